"""On a GPU: the feed-forward block in every layout, and library products under real certificates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bits import assert_equal_bits

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_layout_is_equal_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ["ffn", "--device", "cuda", "--json", str(file)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_plugins.verify", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    for row in json.loads(file.read_text())["rows"]:
        assert {column["mismatched"] for column in row["columns"].values()} == {0}, row


@pytest.mark.gpu
def test_a_certified_library_product_stays_equal_on_a_gpu(tmp_path: Path) -> None:
    from te_overrides.kernels.gemm import ops
    from te_overrides.kernels.gemm.certified import Certificates, Torch

    found = Certificates(Torch(), ops.own_one_lane, tmp_path)
    for m, n, k in ((4096, 4096, 1536), (512, 12288, 4096), (1, 4096, 12288), (32, 4096, 12288)):
        a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        for _ in range(5):
            got = found.product(a, b, a.dtype)
            if got is not None:
                assert_equal_bits(got, ops.own_one_lane(a, b), f"{m}x{n}x{k}")
            a, b = torch.randn_like(a), torch.randn_like(b)
