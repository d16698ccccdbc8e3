"""The portable attention kernels without a GPU: close to the reference and equal to themselves in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from upstream_wheels import ROOT

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from te_overrides.kernels.attention import kernel  # noqa: E402
from te_overrides.kernels.attention.coverage import KernelCoverageError  # noqa: E402
from te_overrides.kernels.attention.launch_table import (  # noqa: E402
    TABLE,
    Entries,
    Launch,
    NoAttentionLaunchError,
    entries_for,
)
from te_overrides.kernels.attention.reference import AttentionError, Mask  # noqa: E402
from te_overrides.kernels.attention.runs import Run, runs_of, work_table  # noqa: E402

# float16 results that round differently once in a while; a wrong tile is off by more than a hundred times that.
CLOSE = 2e-4


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    script = ROOT / "tests" / "triton_cpu" / "attention_in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_the_kernels_compute_attention(interpreted: dict[str, Any]) -> None:
    """Masks, groups, tails, head dimensions that need padding, rows without keys."""
    assert len(interpreted["reference"]) == 6
    for case, results in interpreted["reference"].items():
        assert results.pop("not zero", 0.0) == 0.0
        for name, distance in results.items():
            assert distance < CLOSE, f"{case}: {name} is {distance:.2e} from the reference"


def test_layout_batch_heads_tiles_and_padding_are_not_in_the_bits(interpreted: dict[str, Any]) -> None:
    bits = interpreted["bits"]
    assert bits.pop("mutant: other tiles of keys")[0] > 0, "another number of keys in a tile went unnoticed"
    assert len(bits) == 10
    for case, (mismatched, total) in bits.items():
        assert mismatched == 0, f"{case}: {mismatched} of {total} elements differ"


def test_runs_follow_positions() -> None:
    positions = torch.tensor([4, 5, 6, 12, 13, 20])
    runs = runs_of(positions, 3, 100, 24)
    assert [(r.row, r.count, r.position) for r in runs] == [(3, 3, 4), (6, 2, 12), (8, 1, 20)]
    rebuilt = torch.cat([torch.arange(r.position, r.position + r.count) for r in runs])
    assert torch.equal(rebuilt, positions)
    with pytest.raises(AttentionError, match="fewer than"):
        Run(0, 1, 1 << 29, 0, 1)


def test_the_work_table_cuts_every_row_once_and_starts_with_the_most_work() -> None:
    runs = (Run(0, 100, 0, 0, 400), Run(100, 100, 300, 0, 400), Run(200, 7, 0, 400, 7))
    table = work_table(runs, 32, 1 << 29, 0, torch.device("cpu"))
    assert table is not None
    rows = sorted(row for first, count, *_ in table.tolist() for row in range(first, first + count))
    assert rows == list(range(207))
    seen = [position + count for _, count, position, _, _ in table.tolist()]
    assert seen == sorted(seen, reverse=True)
    assert work_table((), 32, 1, 1, torch.device("cpu")) is None


def test_what_the_kernels_do_not_cover_is_refused_by_name() -> None:
    def call(
        dtype: torch.dtype = torch.bfloat16, d: int = 64, d_v: int = 64, scale: float | None = None
    ) -> None:
        x = torch.zeros(2, 1, 2, d, dtype=dtype)
        kernel.attention_forward(
            x, x, torch.zeros(2, 1, 2, d_v, dtype=dtype), (Run(0, 2, 0, 0, 2),),
            mask=Mask(), softmax_scale=scale,
        )  # fmt: skip

    for found, arguments in {
        "float32.*CPU": {"dtype": torch.float32},
        r"dimension 80.*\(64, 96, 128, 192, 256\).*Pad": {"d": 80, "d_v": 80},
        "64 for queries and keys, 128 for values": {"d_v": 128},
        r"softmax_scale=-1\.0.*positive": {"scale": -1.0},
    }.items():
        with pytest.raises(KernelCoverageError, match=found):
            call(**arguments)
    with pytest.raises(NoAttentionLaunchError, match=r"sm_80.*gfx942.*certif"):
        entries_for("sm_80", 128)


def test_a_class_has_one_tile_of_keys_and_a_row_one_warp() -> None:
    good = Launch(64, 64, 4, 1)
    wrong = Launch(64, 64, 4, 1, nonkdim=16, branch=True)
    for bad, found in (
        (Launch(32, 64, 4, 1), "one warp"),
        (Launch(64, 32, 4, 1), "decode"),
        (wrong, "branch"),
    ):
        with pytest.raises(ValueError, match=found):
            Entries(good, bad, good, good)
    assert {arch for arch, _ in TABLE} == {"sm_90", "gfx942", "gfx950"}
    for (arch, d), entries in TABLE.items():
        every = (entries.forward, entries.decode, entries.dq, entries.dkv)
        assert len({(entry.nonkdim, entry.kpack) for entry in every}) == 1, (arch, d)
