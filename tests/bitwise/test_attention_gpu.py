"""The attention kernels on a GPU: cases of scripts/gpu/attention_bits.py, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from upstream_wheels import ROOT

CASES = (
    "layouts, d 128, bf16, S 1040, window None",
    "layouts, d 96, bf16, S 2048, window 300",
    "batch and repeats, d 128",
    "tiles, d 128, bf16, full",
    "packed, d 128",
    "decode, d 128",
    "a mutant is caught",
)


@pytest.mark.gpu(count=1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_that_is_free_changes_a_bit_on_a_gpu(case: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu" / "attention_checks.py"), "--case", case]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    wrong = [f"{what}: {mismatched} of {total}" for what, mismatched, total in rows if mismatched]
    print(f"{case}: {len(rows)} checks, {sum(row[2] for row in rows):,} elements")
    assert rows and not wrong, "\n".join(wrong)
