"""`verify model` finds equal bits where there are, and says so, and a fault where there is one.

A whole Megatron GPT through upstream's training stack: loss and weight gradients at TP=1 and above
(NVIDIA/Megatron-LM#1736, pytorch/torchtitan#1750), norm gradients under sequence parallelism (NVIDIA/Megatron-LM#1446),
zigzag and contiguous context parallelism (verl#4250, radixark/miles#885).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_plugins.verify.model import command, report
from megatron_plugins.verify.model.plan import COLUMNS

ROOT = Path(__file__).resolve().parents[2]
MUTATED = (sys.executable, "-W", "ignore", str(ROOT / "tests" / "mutated_engine.py"))


def verify(folder: Path, *words: str, engine: tuple[str, ...] = command.ENGINE) -> tuple[int, dict[str, Any]]:
    """Exit status and the report as it was written; {} where none was."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = ["--device", "cpu", "--shape", "tiny", "--out", str(folder), *words]
    status = command.run(parser.parse_args(arguments), engine)
    written = folder / "verify-model.json"
    return status, json.loads(written.read_text()) if written.exists() else {}


def test_two_and_four_ranks_have_the_bits_of_one_in_every_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = ["packed TP2+SP", "packed CP2", "packed PP2"]
    rows = ["one row alone", *packed, "CP2 contiguous", "TP4", "TP2xCP2+SP"]
    status, written = verify(tmp_path, "--layers", "2", "--rows", *rows)
    shown = capsys.readouterr().out
    assert status == 0, shown
    report.check(written)
    results = {row["name"]: row["results"] for row in written["rows"]}
    assert list(results) == rows
    for name, sides in results.items():
        columns = sides["deterministic"]["columns"]
        assert set(columns) == set(COLUMNS[:3] if name == "one row alone" else COLUMNS)
        assert all(column["mismatched"] == 0 for column in columns.values()), f"{name}: {columns}"
    # Every row compares the whole of every result, whichever ranks hold it.
    totals = {
        name: {what: column["total"] for what, column in sides["deterministic"]["columns"].items()}
        for name, sides in results.items()
        if name != "one row alone"
    }
    assert all(total == totals["TP4"] for total in totals.values()), totals
    # Upstream's own figures say what the comparison sees where nobody fixes an order.
    theirs = results["TP4"]["upstream"]["columns"]
    assert min(theirs[what]["mismatched"] for what in ("logits", "log-probs", "gradients", "weights")) > 0
    assert not results["TP2xCP2+SP"]["upstream"]["ran"]
    assert "Equal bits: 0 of" in shown and "upstream: no" not in shown
    assert (tmp_path / "verify-model.png").read_bytes().startswith(b"\x89PNG")
    assert "| TP4 | 4 | 0 of " in (tmp_path / "verify-model.md").read_text()


def test_a_sum_in_another_order_turns_a_row_red_and_a_rank_that_raises_is_quoted_while_other_rows_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["rebuild", "CP2", "TP2", "TP4"]
    status, written = verify(tmp_path, "--no-upstream", "--rows", *rows, engine=MUTATED)
    rebuild, raised, two, four = (row["results"]["deterministic"] for row in written["rows"])
    assert status == 1 and report.differing(rebuild)[0] == report.differing(two)[0] == 0
    assert report.differing(four)[0] > 0 and four["columns"]["logits"]["first"].startswith("logits(")
    assert raised["failed"] and "rank 1: Traceback" in raised["why"]
    shown = capsys.readouterr().out
    assert "CP2: ArithmeticError: this rank was told to fail" in shown
    assert "FAILED: 1 of 3 rows differ from one rank (TP4); failed to run: CP2" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "TP3"], "unknown row 'TP3'; known: rebuild"),
        (["--rows", "PP2"], "1 layers on 2 pipeline stages"),
        (["--rows", "CP4"], "sequence length 64: a rank's runs of 8 positions are no whole granules of 16"),
        (["--no-upstream", "--rows", "rebuild", "--vocabulary", "1000"], "padded vocabulary 1000"),
    ],
)
def test_what_cannot_run_is_status_2_in_words(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, written = verify(tmp_path, *words)
    shown = capsys.readouterr().out
    assert status == 2 and said in shown + json.dumps(written), shown
    assert not any(row["results"]["deterministic"]["ran"] for row in written.get("rows", []))
