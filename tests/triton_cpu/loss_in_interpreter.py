"""Runs the kernels of loss and embedding in Triton's interpreter and prints mismatches against the references.

Started by tests as a process of its own with TRITON_INTERPRET=1, which Triton reads when it is imported. With the
argument `fused` it is NVIDIA's path, with `mutant` that path with ranks' lanes in another order, and no other check.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import math
import sys
import warnings
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.cross_entropy import kernel, narrow, reference
from te_overrides.kernels.embedding import kernel as embedding_kernel
from te_overrides.kernels.embedding import reference as embedding_reference
from te_overrides.kernels.portable_math.reference import exp

Counts = dict[str, list[int]]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_generator = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator).to(dtype)


def compare(counts: Counts, name: str, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Adds [mismatches, elements] under `name`."""
    found = [count_mismatches(a, b)[:2] for a, b in zip(got, want, strict=True)]
    counts[name] = [sum(m for m, _ in found), sum(n for _, n in found)]


def sharded(
    logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, size: int, valid: int | None, negate: bool
) -> list[torch.Tensor]:
    """Output and gradient of `size` ranks that take turns in one process; every rank's output must be the same."""
    parts = logits.chunk(size, -1)
    ranks = [kernel.log_prob_steps(x, target, (index, size), valid, negate) for index, x in enumerate(parts)]
    mine, results = [next(rank) for rank in ranks], []
    for _ in range(2):
        everybody, mine = mine, []
        for rank in ranks:
            try:
                mine.append(rank.send(everybody))
            except StopIteration as end:
                results.append(end.value)
    grads = [
        kernel.log_prob_backward(grad, x, target, *results[index][1:], index, valid, negate)
        for index, x in enumerate(parts)
    ]
    return [*(result[0] for result in results), torch.cat(grads, -1)]


def referred(
    logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, valid: int | None, negate: bool
) -> list[torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    function = reference.vocab_parallel_cross_entropy if negate else reference.vocab_parallel_log_prob
    out = function(leaf, target, None, valid)
    out.backward(grad)
    assert leaf.grad is not None
    return [out.detach(), leaf.grad]


def widths(cases: tuple[tuple[torch.dtype, int, int | None], ...]) -> Counts:
    """Logits of (dtype, columns, valid columns); every TP degree for bfloat16 without padding."""
    counts: Counts = {}
    for dtype, columns, valid in cases:
        logits = (4 * randn(4, columns)).to(dtype)
        target = torch.randint(0, valid or columns, (4,), generator=_generator)
        target[0] = columns - 1
        # Wide rows, equal rows, infinities, NaN.
        logits[1] *= 30
        logits[2] = -0.0
        if dtype == torch.float16:
            logits[0, 7], logits[3, 9], logits[2, 5] = math.inf, math.nan, -math.inf
        grad, negate = randn(4), valid is None
        grad[2] = -0.0
        want = referred(logits, target, grad, valid, negate)
        for size in (1, 2, 4, 8) if valid is None and dtype == torch.bfloat16 else (2,):
            got = sharded(logits, target, grad, size, valid, negate)
            compare(counts, f"{columns} {valid} {dtype} TP={size}", got, [want[0]] * size + want[1:])
    return counts


def losses() -> Counts:
    counts = widths(
        (
            (torch.bfloat16, 2048, None),
            (torch.bfloat16, 1024, 1000),
            (torch.float16, 1024, 1000),
            (torch.float32, 1024, None),
        )
    )
    x, target, grad = randn(2, 3, 2048)[:, 1:, :1024], torch.tensor([[5, 6], [7, 8]]), randn(2, 2)
    compare(counts, "slice", sharded(x, target, grad, 1, None, False), referred(x, target, grad, None, False))
    alone = sharded(x[:1, 1:], target[:1, 1:], grad[:1, 1:], 1, None, False)
    compare(counts, "alone", alone, [t[:1, 1:] for t in referred(x, target, grad, None, False)])
    kernel.log_prob(x[:0], target[:0])
    logits, target = (
        randn(8, 1024, dtype=torch.bfloat16),
        torch.tensor([-1, -100, -(2**63), 1024, 2**62, 0, 1023, -1]),
    )
    logits[7, 3], grad = math.nan, randn(8)
    want = referred(logits, target, grad, None, True)
    for size in (1, 2, 8):
        got = sharded(logits, target, grad, size, None, True)
        compare(counts, f"targets outside the vocabulary TP={size}", got, [want[0]] * size + want[1:])
    return counts


def embeddings() -> Counts:
    counts: Counts = {}
    for dtype in DTYPES:
        ids, grad = torch.randint(-3, 12, (60,), generator=_generator), randn(60, 100, dtype=dtype)
        ids[20:45] = 4
        grad[3], grad[7, :2] = -0.0, torch.tensor([math.inf, math.nan])
        for rows in (8, 12, 1):
            got, want = (
                m.embedding_gradient(ids, grad, rows) for m in (embedding_kernel, embedding_reference)
            )
            compare(counts, f"gradient {dtype} {rows}", [got], [want])
        weight = randn(8, 1100, dtype=dtype)
        weight[2], weight[3, :2] = -0.0, torch.tensor([math.inf, math.nan])
        for name, tokens in {"plain": ids.view(2, 30), "turned": ids.view(2, 30).t()}.items():
            got, want = (m.lookup(tokens, weight, 1) for m in (embedding_kernel, embedding_reference))
            compare(counts, f"lookup {dtype} {name}", [got], [want])
    got, want = (m.embedding_gradient(ids, grad[:, 4:9], 8) for m in (embedding_kernel, embedding_reference))
    compare(counts, "gradient, slice", [got], [want])
    none = torch.full_like(ids, -1)
    compare(counts, "nobody's", [embedding_kernel.embedding_gradient(none, grad, 5)], [torch.zeros(5, 100)])
    return counts


def fuse() -> None:
    """NVIDIA's path, with the C library's fused multiply-add in the place of the interpreter's two roundings."""
    fma = ctypes.CDLL(ctypes.util.find_library("m")).fma
    fma.restype, fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    fused = np.frompyfunc(fma, 3, 1)

    def create_fma(_: InterpreterBuilder, x: Any, y: Any, z: Any) -> TensorHandle:
        return TensorHandle(fused(x.data, y.data, z.data).astype(np.float64), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma
    kernel.is_narrow = lambda hip: True


@triton.jit
def exponentials_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, narrow.exp_of_difference(tl.load(x_ptr + at)))


def exponentials() -> Counts:
    """Random differences, all sizes of them, the ends, and -14.5671…, where ln 2 in one part is not enough."""
    x = torch.cat(
        [
            -104 * torch.rand(3000, generator=_generator),
            -(2.0 ** (-40 * torch.rand(1000, generator=_generator))),
        ]
    )
    hard = torch.tensor([0x416912CD], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, -hard, torch.tensor([0.0, -0.0, -103.97, -103.98, -104.0, -1e30, -math.inf, math.nan])])
    x = torch.cat([x, -torch.linspace(0, 106, 4096 - len(x))])
    got, counts = torch.empty_like(x), Counts()
    exponentials_kernel[(1,)](x, got, len(x))
    compare(counts, "exponentials", [got], [exp(x)])
    return counts


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    # Lanes of several blocks although the interpreter is slow.
    kernel.SUMS = (64, 32)
    found: dict[str, Counts] = {}
    if "mutant" in sys.argv:
        # Lanes in the order 0 2 4 6 1 3 5 7: another bracket.
        joined = kernel._joined
        kernel._joined = lambda pieces: joined(pieces[::2] + pieces[1::2])
        fuse()
        print(json.dumps({"losses": widths(((torch.bfloat16, 1024, None),))}))
        raise SystemExit
    if "fused" in sys.argv:
        fuse()
        found["exponentials"] = exponentials()
    else:
        found["embeddings"] = embeddings()
    print(json.dumps(found | {"losses": losses()}))
