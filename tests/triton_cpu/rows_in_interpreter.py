"""Runs the kernels of RoPE and of sums over tokens in Triton's interpreter; prints mismatches against the references.

Started by a test as a process of its own with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings

import torch

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.granules import kernel as granules
from te_overrides.kernels.granules import reference as granules_reference
from te_overrides.kernels.rope import kernel as rope
from te_overrides.kernels.rope.reference import Rope

Counts = dict[str, list[int]]
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 3e38, math.inf, -math.inf, math.nan]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_generator = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator).to(dtype)


def compare(counts: Counts, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    counts[name] = list(count_mismatches(got, want)[:2])


def special(dtype: torch.dtype) -> torch.Tensor:
    """Without bf16's subnormals, which the interpreter widens to other numbers; the audit has them."""
    found = torch.tensor(SPECIAL).to(dtype)
    tiny = (found.abs() < torch.finfo(torch.bfloat16).smallest_normal) & (found != 0)
    return torch.where(tiny & (dtype == torch.bfloat16), 1e-30, found)


def angles(positions: int, rotated: int) -> torch.Tensor:
    """[positions, 1, 1, rotated] as Megatron makes them, some at the end of the range."""
    inverse = 1.0 / 1e6 ** (torch.arange(0, rotated, 2) / rotated)
    found = torch.outer(torch.arange(positions) * 1237.0, inverse)
    return torch.cat([found, found], dim=-1)[:, None, None, :]


def rotations() -> Counts:
    counts: Counts = {}
    cases = itertools.product((16, 64, 96), (16, 40, 64), DTYPES, (False, True))
    for columns, rotated, dtype, interleaved in cases:
        if rotated > columns:
            continue
        # A slice of packed rows: adjacent columns, one stride between rows.
        packed = randn(5, 2, 3, columns + 8, dtype=dtype)
        t = packed[..., 8:]
        t[0, 0, 0, : len(SPECIAL)] = special(dtype)
        freqs = angles(5, rotated)
        mscale = 1.25 if interleaved else 1.0
        leaf = t.clone().requires_grad_()
        want = Rope.apply(leaf, freqs, interleaved, mscale)
        grad = randn(*t.shape, dtype=dtype)
        grad[1, 0, 0, -len(SPECIAL) :] = special(dtype)
        want.backward(grad)
        c, s = rope.tables(freqs, dtype, mscale)
        name = f"{columns} columns, {rotated} turned, {dtype}, {interleaved}"
        compare(counts, name, rope.rotate(t, c, s, interleaved), want)
        assert leaf.grad is not None
        compare(counts, f"{name}, back", rope.rotate(grad, c, s, interleaved, True), leaf.grad)
    t, freqs = randn(40, 1, 2, 64, dtype=torch.bfloat16), angles(40, 64)
    c, s = rope.tables(freqs, torch.bfloat16, 1.0)
    for name, x in {"transposed": t.transpose(1, 2), "one head": t[:, :, :1]}.items():
        compare(counts, name, rope.rotate(x, c, s, False), Rope.apply(x, freqs, False, 1.0))
    compare(counts, "none", rope.rotate(t[:0], c[:0], s[:0], False), t[:0])
    # Mutation: the rotation the other way is another one.
    compare(counts, "mutant", rope.rotate(t, c, s, False, True), Rope.apply(t, freqs, False, 1.0))
    return counts


def sums() -> Counts:
    counts: Counts = {}
    shapes = ((1, 1, 8), (16, 1, 33), (17, 2, 100), (160, 3, 64), (600, 1, 5))
    for (positions, batch, columns), dtype in itertools.product(shapes, DTYPES):
        terms = randn(positions, batch, columns, dtype=dtype)
        terms[0, 0, :5], terms[:, 0, 5:7] = special(dtype)[:5], -0.0
        compare(
            counts, f"chains {positions}x{batch}x{columns} {dtype}", granules.granule_partials(terms),
            granules_reference.granule_partials(terms.to(torch.float32)),
        )  # fmt: skip
    nothing = randn(4, 2, 0)
    compare(counts, "no column", granules.sum_granules(nothing), granules_reference.sum_granules(nothing))
    for shape in ((1, 1, 3), (2, 1, 64), (5, 3, 100), (40, 2, 4, 16), (1100, 1, 9), (300, 2, 3, 5)):
        partials = randn(*shape)
        partials[..., 0], partials[0, 0, ..., 1] = -0.0, 1e30
        want = granules_reference.sum_granules(partials)
        compare(counts, f"tree {shape}", granules.sum_granules(partials), want)
        if len(shape) == 4 or shape[1] > 1:
            turned = partials.transpose(0, 1).contiguous().view(partials.shape)
            compare(counts, f"mutant {shape}", granules.sum_granules(turned), want)
    return counts


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps({"rotations": rotations(), "sums": sums()}))
