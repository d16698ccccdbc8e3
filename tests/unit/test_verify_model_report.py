"""The report of `verify model` takes exactly its schema; shards and replicas are counted once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatron_plugins.verify.model import report
from megatron_plugins.verify.model.engine import combine
from megatron_plugins.verify.model.plan import COLUMNS, ROWS, SHAPES, selected, why_not

ROOT = Path(__file__).resolve().parents[2]


def column(mismatched: int = 0) -> dict[str, Any]:
    """A column of 100 elements."""
    first = "logits(0, 1)" if mismatched else None
    return {"mismatched": mismatched, "total": 100, "first": first, "max_abs": 0.5 if mismatched else 0.0}


def ran(mismatched: int = 0) -> dict[str, Any]:
    """A result whose logits differ."""
    columns = {name: column(mismatched if name == "logits" else 0) for name in COLUMNS}
    return {"ran": True, "columns": columns, "seconds": 1.0, "peak_bytes": 0}


def given() -> dict[str, Any]:
    """A report of two rows."""
    absent = {"ran": False, "why": "its norm refuses", "failed": False}
    return {
        "schema": report.SCHEMA,
        "environment": {"device": "CPU", "transport": "gloo"},
        "shape": {"name": "tiny"},
        "dtype": "bf16",
        "sides": ["upstream", "deterministic"],
        "rows": [
            {"name": "TP2", "ranks": 2, "results": {"upstream": ran(12), "deterministic": ran()}},
            {"name": "TP2+SP", "ranks": 2, "results": {"upstream": absent, "deterministic": ran()}},
        ],
    }


def at(path: list[Any], value: Any) -> dict[str, Any]:
    """A report with one value replaced, or removed by KeyError."""
    changed = copy.deepcopy(given())
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


OURS = ["rows", 0, "results", "deterministic"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["schema"], "other/1", "schema: expected deterministic-rocm/verify-model/1"),
        (["dtype"], KeyError, "report: expected the keys"),
        (["rows"], [], "rows: expected at least one"),
        (["rows", 1, "name"], "TP2", "a row's name, once"),
        (["rows", 1, "name"], "TP3", "a row's name, once"),
        ([*OURS, "columns", "weights"], KeyError, "TP2.results.deterministic.columns: expected the keys"),
        ([*OURS, "columns", "extra"], column(), "TP2.results.deterministic.columns: expected the keys"),
        ([*OURS, "columns", "loss", "total"], 0, "a positive number"),
        ([*OURS, "columns", "loss", "mismatched"], 101, "expected 0 … 100, found 101"),
        ([*OURS, "columns", "loss", "mismatched"], 1, "an index iff anything differs"),
        ([*OURS, "columns", "loss", "max_abs"], float("nan"), "a finite number or null"),
        (["rows", 1, "results", "upstream", "why"], "", "a reason"),
        (["rows", 1, "results", "upstream"], KeyError, "TP2+SP.results: expected the keys"),
    ],
)
def test_a_result_that_is_not_what_it_should_be_is_named(path: list[Any], value: Any, said: str) -> None:
    with pytest.raises(report.ReportError) as error:
        report.check(at(path, value))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (given(), 0, "Equal bits: 0 of 1,200 elements differ in 2 rows; upstream differs in 1 of 1 figures."),
        (at(OURS, ran(3)), 1, "FAILED: 1 of 2 rows differ from one rank (TP2)"),
        (at(OURS, {"ran": False, "why": "x", "failed": True}), 2, "FAILED TO RUN: TP2"),
        (at(OURS, {"ran": False, "why": "x", "failed": False}), 0, "differ in 1 rows; not run here: TP2"),
    ],
)
def test_a_verdict_and_a_status(change: dict[str, Any], status: int, said: str) -> None:
    report.check(change)
    assert report.exit_status(change) == status and said in report.verdict(change)
    assert said in report.markdown(change)


def test_replicas_count_once_by_the_worst_of_them_and_shards_add_up() -> None:
    def record(name: str, replica: list[int], mismatched: int) -> dict[str, Any]:
        first = f"{name}(0,)" if mismatched else None
        return {
            "column": "gradients", "name": name, "replica": replica, "mismatched": mismatched, "total": 10,
            "first": first, "max_abs": float(mismatched),
        }  # fmt: skip

    same = [record("norm", [], 0), record("norm", [], 2), record("norm", [], 1)]
    shards = [record("linear", [0], 0), record("linear", [1], 3)]
    assert combine([*same, *shards])["gradients"] == {
        "mismatched": 5, "total": 30, "first": "norm(0,)", "max_abs": 3.0
    }  # fmt: skip


def test_every_row_is_selectable_runs_on_the_cpu_and_is_documented() -> None:
    text = (ROOT / "docs" / "verify.md").read_text()
    for row in ROWS:
        assert selected([row.name], 1) == [row]
        assert why_not(row, "deterministic", SHAPES["small"], "cpu", 0) is None
        assert f"`{row.name}`" in text, f"docs/verify.md does not name the row {row.name}"


def test_a_row_that_no_gpu_can_run_says_what_it_needs() -> None:
    shape = SHAPES["qwen3-8b-layers"]
    (pipeline,) = selected(["PP2"], 8)
    why = why_not(pipeline, "deterministic", shape, "cuda", 1)
    assert why is not None and why.startswith("2 ranks on 1 GPU")
    assert why_not(pipeline, "deterministic", shape, "cuda", 2) is None
