"""The roofline of docs/evidence/gemm.md is what its JSON and the sizes say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
HIDDEN, INTERMEDIATE, ELEMENT = 4096, 12288, 2
FLOPS, BYTES = 989e12, 4.8e12
"""A second, by the vendor: dense bf16, memory."""


def _product(m: int, n: int, k: int, written: int) -> tuple[int, int]:
    """(FLOPs, least bytes) of [m, k] with [n, k], of which `written` columns are stored."""
    return 2 * m * n * k, ELEMENT * (m * k + n * k + m * written)


def _row(name: str, products: list[tuple[int, int]], library: float, ours: float, wanted: float) -> str:
    """`wanted`: of the library's time."""
    bound = sum(max(flops / FLOPS, size / BYTES) for flops, size in products) * 1e3
    by = "bytes" if products[0][1] / BYTES > products[0][0] / FLOPS else "FLOPs"
    gflop, megabytes = (
        sum(column) / unit for column, unit in zip(zip(*products, strict=True), (1e9, 1e6), strict=True)
    )
    return (
        f"| {name} | {gflop:.1f} | {megabytes:.0f} | {bound:.3f}, {by} | {library:.3f} | {ours:.3f} "
        f"| {ours / library:.2f} / {wanted} | {bound / library:.2f} |"
    )


def rows() -> Iterator[str]:
    times = json.loads((EVIDENCE / "results" / "ffn-h200.json").read_text())["times"]
    ms = {cell["cell"]: cell["ms"] for cell in times}
    for m in (1, 8, 32, 512, 2048, 4096, 8192):
        products = [
            _product(m, 2 * INTERMEDIATE, HIDDEN, INTERMEDIATE), _product(m, HIDDEN, INTERMEDIATE, HIDDEN)
        ]  # fmt: skip
        cell = ms[f"FFN forward, M={m}"]
        yield _row(f"forward, M = {m}", products, cell["Qwen3MLP"], cell["ours"], 0.88 if m <= 32 else 0.97)
    for m in (2048, 4096, 8192):
        cell = ms[f"down, M={m}"]
        down = [_product(m, HIDDEN, INTERMEDIATE, HIDDEN)]
        yield _row(f"portable tree, down, M = {m}", down, cell["cuBLAS"], cell["portable tree"], 1.35)


def test_the_roofline_of_the_evidence_is_computed_from_its_json() -> None:
    page = (EVIDENCE / "gemm.md").read_text().splitlines()
    want = list(rows())
    missing = [row for row in want if row not in page]
    assert not missing, f"{len(missing)} of {len(want)} rows: {missing}"
