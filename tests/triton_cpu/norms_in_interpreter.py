"""Runs the norm's Triton kernels in Triton's interpreter and prints, as JSON, mismatches against the references.

Started by tests as a process of its own with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings

import torch
import triton
import triton.language as tl

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.rmsnorm import add, kernel, reference
from te_overrides.kernels.tree.kernel import tree_of_rows
from te_overrides.kernels.tree.reference import balanced_tree_dim

Counts = dict[str, list[int]]
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 3e38, math.inf, -math.inf, math.nan]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Whole granules and a single position, even and odd widths; every dtype, the one that trains with both forms of weight.
BACKWARDS = (
    (64, 20, torch.bfloat16, False),
    (64, 20, torch.float16, True),
    (64, 20, torch.float32, False),
    (100, 20, torch.bfloat16, True),
    (100, 1, torch.float16, False),
    (100, 1, torch.float32, True),
)
_generator = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator).to(dtype)


def compare(counts: Counts, name: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """Adds [mismatches, elements] under `name`."""
    found = [count_mismatches(a, b)[:2] for a, b in zip(got, want, strict=True)]
    counts[name] = [sum(m for m, _ in found), sum(n for _, n in found)]


@triton.jit
def sum_rows(x_ptr, out_ptr, LEVELS: tl.constexpr, TREE: tl.constexpr):
    """out[row] = sum of 2^LEVELS columns, by the tree or by halves, which is the order of a butterfly."""
    column = tl.arange(0, 2**LEVELS)
    x = tl.load(x_ptr + tl.program_id(0) * 2**LEVELS + column)[None, :]
    if TREE:
        total = tree_of_rows(x, LEVELS)
    else:
        for _ in tl.static_range(LEVELS):
            x = tl.sum(tl.reshape(x, [1, 2, x.shape[1] // 2]), axis=1)
        total = tl.reshape(x, [1])
    tl.store(out_ptr + tl.program_id(0) + tl.arange(0, 1), total)


def trees() -> Counts:
    counts: Counts = {}
    for levels, rows in ((0, 40), (1, 40), (3, 40), (6, 40), (10, 10), (15, 2)):
        x = randn(rows, 2**levels)
        x[0], x[1, 0] = -0.0, 1e30
        for tree in (True, False):
            got = torch.empty(rows)
            sum_rows[(rows,)](x, got, levels, tree)
            compare(counts, f"{'tree' if tree else 'mutant'} {levels}", (got,), (balanced_tree_dim(x, 1),))
    return counts


def forwards() -> Counts:
    counts: Counts = {}
    for columns, dtype, zero_centered in itertools.product((64, 100, 640), DTYPES, (False, True)):
        x, residual = randn(4, 1, columns, dtype=dtype), randn(4, 1, columns, dtype=dtype)
        x[0, 0, : len(SPECIAL)], x[1], residual[1] = torch.tensor(SPECIAL), 0.0, -0.0
        residual[2] = -x[2]
        weight = randn(columns, dtype=torch.float32 if columns == 100 else dtype)
        arguments = (weight, 1e-6, zero_centered)
        name = f"{columns} {dtype} {zero_centered}"
        compare(counts, f"norm {name}", kernel.rmsnorm(x, *arguments), reference.rmsnorm(x, *arguments))
        got, want = (module.add_rmsnorm(x, residual, *arguments) for module in (kernel, add))
        compare(counts, f"add {name}", got, want)
    for columns in (4096, 32768):
        x, residual, weight = (randn(columns, dtype=torch.bfloat16) for _ in range(3))
        got, want = (module.add_rmsnorm(x, residual, weight, 1e-5) for module in (kernel, add))
        compare(counts, f"add {columns}", got, want)
    # Rows of a slice, rows that need a copy, one row, none.
    packed, weight = randn(6, 2, 3, 200, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    for name, x in {
        "slice": packed[..., 40:104],
        "transposed": packed[..., 40:104].transpose(0, 1),
        "row": packed[0, 0, 0, :64],
        "none": packed[:0, ..., :64],
    }.items():
        compare(counts, f"norm {name}", kernel.rmsnorm(x, weight, 1e-6), reference.rmsnorm(x, weight, 1e-6))
    return counts


def backwards() -> Counts:
    counts: Counts = {}
    for columns, positions, dtype, zero_centered in BACKWARDS:
        grad, stream, x = (randn(positions, 2, columns, dtype=dtype) for _ in range(3))
        x[0, 0, :8], grad[0, 1] = torch.tensor(SPECIAL), -0.0
        weight = randn(columns, dtype=dtype)
        _, rstd = reference.rmsnorm(x, weight, 1e-6, zero_centered)
        name = f"{columns} x {positions} {dtype} {zero_centered}"
        got, want = (
            m.rmsnorm_backward_partials(grad, x, weight, rstd, zero_centered) for m in (kernel, reference)
        )
        compare(counts, f"norm {name}", got, want)
        got, want = (
            m.add_rmsnorm_backward_partials(grad, stream, x, weight, rstd, zero_centered)
            for m in (kernel, add)
        )
        compare(counts, f"add {name}", got, want)
    grad, stream, x = (randn(2, 1, 20000, dtype=torch.bfloat16) for _ in range(3))
    weight = randn(20000)
    _, rstd = reference.rmsnorm(x, weight, 1e-6)
    got, want = (m.add_rmsnorm_backward_partials(grad, stream, x, weight, rstd) for m in (kernel, add))
    compare(counts, "long rows", got, want)
    for heads, groups, positions in ((8, 2, 17), (6, 6, 3), (5, 1, 17)):
        x, grad = (randn(positions, 1, heads, 200, dtype=torch.bfloat16)[..., 8:136] for _ in range(2))
        weight = randn(128, dtype=torch.bfloat16)
        _, rstd = reference.rmsnorm(x, weight, 1e-6)
        got, want = (
            m.rmsnorm_backward_partials(grad, x, weight, rstd, False, groups) for m in (kernel, reference)
        )
        compare(counts, f"{heads} heads in {groups} groups", got, want)
    return counts


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps({"trees": trees(), "forwards": forwards(), "backwards": backwards()}))
