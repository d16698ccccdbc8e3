"""`verify ffn` finds the block equal in every layout, finds a broken order, and does not pass what did not run.

NVIDIA/Megatron-LM#1736, pytorch/torchtitan#1750: TP=1 and TP=2 disagree in loss and weight gradients.
NVIDIA/TransformerEngine#1761: sums in bf16 lose accuracy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_plugins.verify.ffn import plan

ROOT = Path(__file__).resolve().parents[2]


def verify(file: Path, *words: str, module: str | None = None) -> tuple[int, Any, str]:
    """(status, report, output) of the command, in a process of its own since it arms the patch layer."""
    program = "import sys\nfrom megatron_plugins.verify.ffn import command\n"
    program += "from megatron_plugins.verify import __main__\n"
    if module:
        program += f"command.RANK = {module!r}\n"
    program += "sys.exit(__main__.main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "ffn", "--device", "cpu", "--json", str(file), *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COLUMNS": "160"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.returncode, json.loads(file.read_text()) if file.is_file() else None, run.stdout + run.stderr


def test_the_matrix_is_the_published_one() -> None:
    names = {case.name for case in plan.cases()}
    for mesh in ("tp2", "tp2_sp", "tp4", "tp2_cp2", "tp2_cp2_sp", "tp8", "tp4_cp2", "tp4_cp2_sp"):
        assert {f"{mesh} M=32 forward", f"{mesh} M=8 backward"} <= names
    assert {f"tp1 M={rows} forward" for rows in (1, 8, 32)} <= names
    assert {end - first for first, end in plan.SLICES} >= {31, 33, 127, 4096}
    assert plan.FULL == (4096, 12288)


def test_without_a_file_the_report_is_all_that_standard_output_has() -> None:
    words = ["--device", "cpu", "--hidden", "64", "--intermediate", "128", "--only", "tp2 M=8"]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_plugins.verify", "ffn", *words, "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["check"] == "ffn"
    assert "elements differ" in run.stderr


def test_every_layout_is_equal_and_works_its_share(tmp_path: Path) -> None:
    status, report, output = verify(
        tmp_path / "r.json", "--hidden", "64", "--intermediate", "128", "--only", "M=8 backward"
    )
    assert status == 0, output
    assert len(report["rows"]) == 9
    for row in report["rows"]:
        assert {column["mismatched"] for column in row["columns"].values()} == {0}, row
        assert {"dHidden", "dW 1 grad", "dW 3 grad", "dW 3 main_grad", "repeats"} <= set(row["columns"])
    for row in report["work"]:
        assert row["flops"] == [row["share"]] * row["ranks"]
    found = report["precision"]
    assert (
        found["bf16 lanes"] <= 1.5 * found["Qwen3MLP"] and found["float32 lanes"] <= 1.02 * found["Qwen3MLP"]
    )


def test_a_broken_order_is_found(tmp_path: Path) -> None:
    words = ("--hidden", "64", "--intermediate", "128", "--only", "tp2_cp2")
    status, report, output = verify(tmp_path / "r.json", *words, module="broken_ffn")
    assert status == 1, output
    trees, tokens = (
        next(row["columns"] for row in report["rows"] if row["case"] == f"{mesh} M=8 backward")
        for mesh in ("tp2_cp2_sp", "tp2_cp2")
    )
    for column in ("forward", "training output", "dHidden", "dW 1 grad", "dW 3 main_grad"):
        # Weight gradients are one lane each, of values that no tree has touched; nothing else sums over tokens.
        of_tokens = column.startswith("dW")
        print(column, trees[column], tokens[column])
        assert (trees[column]["mismatched"] > 0) == (not of_tokens), f"{column}: {trees[column]}"
        # Rounded to 16 bits, sums of eight tokens show hardly any of it; in float32 they do.
        if column != "dW 1 grad":
            assert (tokens[column]["mismatched"] > 0) == of_tokens, f"{column}: {tokens[column]}"
    assert "FAILED" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "tp64"), "no case has 'tp64' in its name"),
        (("--seconds", "0", "--only", "tp2 M=32"), "the time of --seconds was up"),
        (("--device", "cuda"), "sought a GPU"),
    ],
)
def test_what_did_not_run_ends_with_status_2(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    status, _, output = verify(tmp_path / "r.json", "--hidden", "64", "--intermediate", "128", *words)
    assert (status, said in output) == (2, True), output


def test_a_size_that_the_lanes_do_not_divide_is_told_for_every_case(tmp_path: Path) -> None:
    # NVIDIA/Megatron-LM#1754: sizes that cannot be cut must not run with other bits.
    words = ("--hidden", "64", "--intermediate", "12290", "--only", "tp4 M=8")
    status, report, output = verify(tmp_path / "r.json", *words)
    assert status == 2
    assert all("skipped" in row for row in report["rows"])
    assert "12290" in output
