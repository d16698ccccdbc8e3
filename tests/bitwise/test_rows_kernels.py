"""Kernels of RoPE and of sums over tokens equal their references in Triton's interpreter; devices are told by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from te_overrides.kernels.devices import DeviceError
from te_overrides.kernels.granules import ops as granules
from te_overrides.kernels.rmsnorm import ops as rmsnorm
from te_overrides.kernels.rope import ops as rope
from upstream_wheels import ROOT


@pytest.mark.slow
def test_every_kernel_equals_its_reference_in_the_interpreter() -> None:
    """Every dtype, odd widths, strided rows, special values, empty; another direction or order is noticed."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    script = ROOT / "tests" / "triton_cpu" / "rows_in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert len(counts["rotations"]) > 80 and len(counts["sums"]) > 20
    for group in counts.values():
        for name, (mismatched, total) in group.items():
            if "mutant" in name:
                assert mismatched > 0, f"{name} went unnoticed"
            else:
                assert mismatched == 0, f"{name}: {mismatched} of {total} elements differ"


def test_a_device_without_proof_is_refused_by_name() -> None:
    x = torch.empty(4, 1, 64, device="meta")
    for call in (
        lambda: rmsnorm.rmsnorm(x, x[0, 0], 1e-6),
        lambda: rmsnorm.add_rmsnorm(x, x, x[0, 0], 1e-6),
        lambda: rope.rope(x, x),
        lambda: granules.sum_granules(x),
    ):
        with pytest.raises(DeviceError, match="the operands lie on meta"):
            call()
