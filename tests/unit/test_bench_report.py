"""Results are read strictly and a regenerated page loses no row, whatever key or cell is dropped or renamed."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

import results  # noqa: E402

import report  # noqa: E402


def cell(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "path": "forward, tp1", "rows": 8, "topology": "tp1", "peer": "Qwen3MLP",
        "ms": {"Qwen3MLP": 2.0, "ours": 1.0, "two library products": 1.5}, "mismatched": 0, "compared": 10,
        "moved": None, "peak_extra": {}, "price_s": 1.0, "cost_s": 2.0, "skipped": None, **changes,
    }  # fmt: skip


UNREACHED: dict[str, Any] = {
    "ms": {}, "mismatched": None, "compared": None, "cost_s": None, "skipped": "needs 2 GPUs, found 1",
}  # fmt: skip


def found() -> dict[str, Any]:
    cells = [cell("forward, M=8"), cell("forward, M=1"), cell("forward, tp2", **UNREACHED)]
    return {
        "schema": 2, "benchmark": "ffn", "command": "python scripts/bench.py ffn", "sizes": {"hidden": 4096},
        "environment": {
            "device": "GPU", "gpus": 1, "torch": "2", "triton": "3", "transformers": "4", "megatron_core": None,
            "cuda": "13", "hip": None,
        },
        "planned": [c["name"] for c in cells], "cells": cells,
    }  # fmt: skip


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "bench-ffn.json").write_text(json.dumps(values))
    return folder


def make(folder: Path, *words: str) -> int:
    return report.main(["--evidence", str(folder), *words])


def places(values: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of the schema: of the file, of the environment, of a cell."""
    out = [(*at, key) for key in values]
    if not at:
        out += places(values["environment"], ("environment",)) + places(values["cells"][0], ("cells", 0))
    return out


def test_the_page_has_every_cell_measured_or_not(tmp_path: Path) -> None:
    assert make(written(tmp_path, found())) == 0
    page = (tmp_path / "bench-ffn.md").read_text()
    for name in found()["planned"]:
        assert report.first_cells(page).count(name) == 1
    assert "needs 2 GPUs, found 1" in page
    assert (tmp_path / "plots" / "bench-ffn.svg").read_text().startswith("<?xml")
    assert make(tmp_path, "--check") == 0


@pytest.mark.parametrize("place", places(found()), ids=lambda place: ".".join(map(str, place)))
def test_a_key_that_is_dropped_or_renamed_is_an_error_and_the_page_stays(
    tmp_path: Path, place: tuple[Any, ...]
) -> None:
    assert make(written(tmp_path, found())) == 0
    page = (tmp_path / "bench-ffn.md").read_text()
    for renamed in (False, True):
        values = copy.deepcopy(found())
        holder: Any = values
        for key in place[:-1]:
            holder = holder[key]
        value = holder.pop(place[-1])
        if renamed:
            holder[f"{place[-1]}s"] = value
        assert make(written(tmp_path, values)) == 1
        with pytest.raises(results.SchemaError, match=place[-1]):
            results.load(tmp_path / "results" / "bench-ffn.json")
    assert (tmp_path / "bench-ffn.md").read_text() == page


def test_a_cell_that_is_dropped_renamed_or_doubled_is_an_error() -> None:
    for change in (
        lambda v: v["cells"].pop(0),
        lambda v: v["cells"][0].update(name="forward, M=9"),
        lambda v: v["cells"].append(v["cells"][0]),
        lambda v: (v["cells"].append(v["cells"][0]), v["planned"].append(v["planned"][0])),
    ):
        values = found()
        change(values)
        with pytest.raises(results.SchemaError, match="cell"):
            results.parse(json.dumps(values), "here")


def test_a_renamed_implementation_is_an_error_and_not_an_empty_row() -> None:
    values = found()
    values["cells"][0]["ms"] = {"Qwen3 MLP": 2.0, "ours": 1.0}
    with pytest.raises(results.SchemaError, match="Qwen3MLP"):
        results.parse(json.dumps(values), "here")


@pytest.mark.parametrize("change", [{"skipped": ""}, {"mismatched": None}, {"cost_s": None}])
def test_a_cell_without_reason_bits_or_cost_is_an_error(change: dict[str, Any]) -> None:
    values = found()
    values["cells"][0].update(change)
    with pytest.raises(results.SchemaError):
        results.parse(json.dumps(values), "here")


def test_a_row_vanishes_from_a_page_only_by_name(tmp_path: Path) -> None:
    assert make(written(tmp_path, found())) == 0
    page = (tmp_path / "bench-ffn.md").read_text()
    fewer = found()
    del fewer["cells"][1], fewer["planned"][1]
    assert make(written(tmp_path, fewer)) == 1
    assert (tmp_path / "bench-ffn.md").read_text() == page
    assert make(tmp_path, "--drop", "forward, M=1", "--drop", "forward, M=1: two library products") == 0
    assert "M=1" not in (tmp_path / "bench-ffn.md").read_text()


def test_a_row_that_has_run_since_is_no_lost_row(tmp_path: Path) -> None:
    assert make(written(tmp_path, found())) == 0
    more = found()
    more["cells"][2] = cell("forward, tp2")
    assert make(written(tmp_path, more)) == 0
    assert make(tmp_path, "--check") == 0


def test_no_results_is_not_a_pass(tmp_path: Path) -> None:
    assert make(tmp_path) == 2


def test_the_pages_of_this_repository_are_up_to_date() -> None:
    if list((ROOT / "docs" / "evidence" / "results").glob("bench-*.json")):
        assert report.main(["--check"]) == 0


def test_bench_ffn_on_a_cpu_lists_every_cell_with_times_or_reason(tmp_path: Path) -> None:
    file = tmp_path / "bench-ffn.json"
    words = ["ffn", "--device", "cpu", "--rows", "1", "8", "--repeats", "1", "--json", str(file)]

    def bench(*more: str) -> int:
        # Ranks are forked from it, and must not inherit a Megatron that another test has imported.
        return subprocess.run([sys.executable, str(ROOT / "scripts" / "bench.py"), *words, *more]).returncode

    assert bench() == 0
    got = results.load(file)
    assert len(got.cells) == 8
    for c in got.cells:
        assert c.skipped == "needs 2 GPUs, found 0" if c.topology == "tp2" else c.mismatched == 0
    assert bench("--path-budget-seconds", "0") == 2
    for c in results.load(file).cells:
        assert c.skipped is not None and c.cost_s is None and c.price_s > 0
