"""The quick start's report: it takes exactly its schema, and shows what it was given."""

import copy
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import quickstart
import step0_report
from megatron_plugins.verify.progress import Progress
from step0_report import ReportError


def result(mismatched, what=None, delta=None):
    parts = {
        "logits": [mismatched, 1000],
        "log-probs": [0, 100],
        "loss": [0, 1],
        "gradients": [0, 2000],
        "gradient norm": [0, 3],
        "weights": [0, 2997],
    }
    out = {
        "mismatched": mismatched,
        "total": 6101,
        "max_abs_logprob": (1e-3 if mismatched else 0.0) if delta is None else delta,
        "seconds": 1.25,
        "parts": parts,
    }
    return out if what is None else {**out, "what": what}


def given():
    return {
        "environment": {"device": "CPU", "torch": "2.13.0", "cores": 2},
        "rows": [
            {
                "name": "TP2",
                "dtype": "bf16",
                "micro_batches": 1,
                "upstream": result(12, what="local spec, TP2 against TP1"),
                "deterministic": result(0),
            },
            {
                "name": "CP2",
                "dtype": "bf16",
                "micro_batches": 3,
                "upstream": None,
                "upstream_why_absent": "its DotProductAttention refuses context parallelism",
                "deterministic": result(0),
            },
        ],
    }


def plain_console():
    return Console(file=io.StringIO(), width=160, force_terminal=False)


def change(path, value):
    """A report with the value at `path` replaced; a value of None with a leading "del" removes the key."""
    report = copy.deepcopy(given())
    place = report
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return report


def test_json_markdown_and_plot_are_written_and_agree(tmp_path):
    console = plain_console()
    report = step0_report.write(given(), tmp_path / "out", console)
    assert report.failures() == []
    written = json.loads((tmp_path / "out" / "step0.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["TP2", "CP2"]
    assert written["rows"][0]["upstream"]["mismatched"] == 12
    assert written["rows"][1]["upstream"] is None
    text = (tmp_path / "out" / "step0.md").read_text()
    shown = console.file.getvalue()
    assert "12 of 6,101 (0.197%)" in text
    assert "no figure" in shown
    for place in (text, shown):
        assert (
            "0 mismatched elements in all 2 rows; upstream differs in 1 of the 1 that have its figure"
            in place
        )
        assert "its DotProductAttention refuses context parallelism" in place
    assert "local spec, TP2 against TP1" in text
    assert (tmp_path / "out" / "step0.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_written_is_a_valid_report_again(tmp_path):
    step0_report.write(given(), tmp_path, plain_console())
    written = json.loads((tmp_path / "step0.json").read_text())
    assert step0_report.checked(written) == step0_report.checked(given())


def test_a_deterministic_mismatch_is_a_failure_and_said_first():
    report = step0_report.checked(change(("rows", 1, "deterministic"), result(1)))
    assert [row.name for row in report.failures()] == ["CP2"]
    assert step0_report.verdict(report).startswith(
        "FAILED: deterministic runs differ in 1 of 2 rows (CP2 · bf16 · 3 mb"
    )


def test_the_table_fits_eighty_columns():
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    report = change(("rows", 0, "name"), "reference vs actor")
    report["rows"][0]["deterministic"]["parts"]["logits"] = [1_234_567, 8_388_608]
    report["rows"][0]["deterministic"]["mismatched"] = 1_234_567
    report["rows"][0]["deterministic"]["total"] = 8_388_608 + 5101
    console.print(step0_report.table(step0_report.checked(report)))
    shown = console.file.getvalue()
    assert "reference vs actor" in shown
    assert "1,234,567" in shown
    assert "…" not in shown


def test_few_mismatches_are_never_shown_as_none():
    few = step0_report.Result(1, 10**9, 0.0, 1.0, {})
    assert few.count() == "1 of 1,000,000,000 (<0.01%)"


@pytest.mark.parametrize("key", ["name", "dtype", "micro_batches", "upstream", "deterministic"])
def test_a_missing_row_key_is_named(key):
    with pytest.raises(ReportError, match=rf"rows\[0\].*missing key '{key}'"):
        step0_report.checked(change(("rows", 0, key), KeyError))


@pytest.mark.parametrize("key", ["mismatched", "total", "max_abs_logprob", "seconds", "what", "parts"])
def test_a_missing_upstream_key_is_named(key):
    with pytest.raises(ReportError, match=rf"rows\[0\] \(TP2\).upstream: missing key '{key}'"):
        step0_report.checked(change(("rows", 0, "upstream", key), KeyError))


@pytest.mark.parametrize("part", step0_report.MODEL_PARTS)
def test_a_deterministic_row_compares_every_part_of_the_model(part):
    with pytest.raises(ReportError, match=rf"deterministic.parts: missing key '{part}'"):
        step0_report.checked(change(("rows", 0, "deterministic", "parts", part), KeyError))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("row",), [], "report: unknown key 'row'"),
        (("rows", 0, "mismatches"), 0, r"rows\[0\]: unknown key 'mismatches'; known are name, dtype"),
        (("rows", 0, "deterministic", "parts", "grads"), [0, 1], "deterministic.parts: unknown key 'grads'"),
        (("rows", 0, "deterministic", "mismatched"), 5, "mismatched: is 5, its parts add up to 0"),
        (("rows", 0, "deterministic", "total"), 5, "total: is 5, its parts add up to 6101"),
        (
            ("rows", 0, "deterministic", "seconds"),
            -1.0,
            "seconds: expected a finite float of 0 or more, got -1.0",
        ),
        (("rows", 0, "deterministic", "max_abs_logprob"), float("nan"), "max_abs_logprob: expected a finite"),
        (("rows", 0, "deterministic", "mismatched"), 0.0, "mismatched: expected a finite int"),
        (("rows", 0, "deterministic", "mismatched"), False, "mismatched: expected a finite int"),
        (
            ("rows", 0, "deterministic", "parts", "loss"),
            [0],
            r"loss: expected \[mismatched, total\], got \[0\]",
        ),
        (("rows", 0, "upstream_why_absent"), "none", "keep one"),
        (("rows", 1, "upstream_why_absent"), None, "does not say why"),
        (("rows", 1, "upstream_why_absent"), KeyError, "does not say why"),
        (("rows", 0, "name"), "", "name: expected a text that is not empty"),
        (("rows", 1), given()["rows"][0], "TP2 · bf16 · 1 mb is there twice"),
        (("rows",), [], "rows: expected a list that is not empty"),
        (("environment", "torch"), None, "environment.torch: expected a text or a number, got None"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(path, value, message, tmp_path):
    with pytest.raises(ReportError, match=message):
        step0_report.write(change(path, value), tmp_path / "out", plain_console())
    assert not (tmp_path / "out").exists()


def test_a_row_about_single_functions_may_compare_their_outputs_alone():
    lse = {"mismatched": 0, "total": 8, "max_abs_logprob": None, "seconds": 0.1, "parts": {"lse": [0, 8]}}
    upstream = {
        **lse,
        "mismatched": 3,
        "parts": {"lse": [3, 8]},
        "what": "LSE merge before and after nine shapes",
    }
    report = step0_report.checked(
        {
            "environment": {"device": "CPU"},
            "rows": [
                {
                    "name": "LSE merge",
                    "dtype": "fp32",
                    "micro_batches": 1,
                    "upstream": upstream,
                    "deterministic": lse,
                }
            ],
        }
    )
    assert "| 3 of 8 (37.5%) | - | 0 of 8 | - |" in step0_report.markdown(report)


def test_the_environment_names_versions():
    found = step0_report.environment("CPU")
    assert found["device"] == "CPU"
    assert found["torch"] != "not installed"


@pytest.mark.parametrize("rows", [1, 28])
def test_the_plot_takes_any_number_of_rows_and_all_zeros(rows, tmp_path):
    report = given()
    row = report["rows"][1]
    report["rows"] = [{**row, "name": f"layout {index}"} for index in range(rows)]
    step0_report.draw(step0_report.checked(report), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_progress_prints_one_line_per_run_without_a_terminal():
    console = plain_console()
    with Progress("layouts", total=2, console=console) as progress:
        progress.begin("TP2 [bf16]")
        progress.begin("CP2")
        progress.end("CP2", "0 of 8 differ")
        progress.end("TP2 [bf16]", "0 of 8 differ")
    assert console.file.getvalue().splitlines() == [
        "[1/2] CP2: 0 of 8 differ",
        "[2/2] TP2 [bf16]: 0 of 8 differ",
    ]


def test_progress_draws_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Progress("layouts", total=1, console=console) as progress:
        progress.begin("TP2")
        progress.end("TP2", "0 of 8 differ")
    assert "1/1" in console.file.getvalue()


def test_progress_refuses_the_end_of_what_never_began():
    with (
        Progress("layouts", total=1, console=plain_console()) as progress,
        pytest.raises(ValueError, match="'TP4' ends"),
    ):
        progress.end("TP4", "")


def test_the_quick_start_has_a_row_for_every_layout_and_a_reason_where_upstream_has_none():
    columns = {
        name: {"mismatched": 0, "total": 4, "first": None, "max_abs": 0.0}
        for name in step0_report.MODEL_PARTS
    }
    measured = quickstart._row_result({"ran": True, "columns": columns, "seconds": 1.0, "peak_bytes": 0})
    sides = {
        side: {row.name for row in quickstart.rows_of(side, quickstart.LAYOUTS)}
        for side in ("upstream", "ring", "deterministic")
    }
    assert sides["upstream"] == {"TP2", "TP4"} and sides["ring"] == {"CP2", "CP4"}
    assert sides["deterministic"] == set(quickstart.LAYOUTS)
    upstream = {
        (name, dtype): measured for name in sides["upstream"] | sides["ring"] for dtype in quickstart.DTYPES
    }
    ours = {(name, dtype): measured for name in quickstart.LAYOUTS for dtype in quickstart.DTYPES}
    lse = {"mismatched": 3, "total": 8, "seconds": 0.1, "max_abs": 1e-7}
    rows = quickstart.build_rows(upstream, ours, lse, quickstart.LAYOUTS)
    report = step0_report.checked({"environment": {"device": "CPU"}, "rows": rows})
    assert len(report.rows) == 2 * len(quickstart.LAYOUTS) and not report.failures()
    absent = {row.name for row in report.rows if row.upstream is None and row.dtype == "fp32"}
    assert absent == {"TP2+SP", "TP2xCP2+SP"}
