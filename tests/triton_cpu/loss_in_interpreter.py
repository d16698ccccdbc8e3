"""Runs the kernels of loss and embedding in Triton's interpreter and prints, as JSON, mismatches against the references.

Started by tests as a process of its own with TRITON_INTERPRET=1, which Triton reads when it is imported. With the
argument `mutant` one block of a lane is added in another place of the tree.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import warnings

import torch

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.cross_entropy import kernel, reference
from te_overrides.kernels.embedding import kernel as embedding_kernel
from te_overrides.kernels.embedding import reference as embedding_reference

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
    ranks = [
        kernel.log_prob_steps(x, target, (index, size), valid, negate) for index, x in enumerate(parts)
    ]
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


def losses() -> Counts:
    counts: Counts = {}
    for dtype, (columns, valid) in itertools.product(DTYPES, ((1024, 1000), (3072, None))):
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
    x, target, grad = randn(2, 3, 2048)[:, 1:, :1024], torch.tensor([[5, 6], [7, 8]]), randn(2, 2)
    compare(counts, "slice", sharded(x, target, grad, 1, None, False), referred(x, target, grad, None, False))
    alone = sharded(x[:1, 1:], target[:1, 1:], grad[:1, 1:], 1, None, False)
    compare(counts, "alone", alone, [t[:1, 1:] for t in referred(x, target, grad, None, False)])
    kernel.log_prob(x[:0], target[:0])
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


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    # Lanes of several blocks although the interpreter is slow.
    kernel.SUMS = (64, 32)
    if "mutant" in sys.argv:
        # Lanes in the order 0 2 1 3 …: another bracket.
        joined = kernel._joined
        kernel._joined = lambda pieces: joined(pieces[::2] + pieces[1::2])
    print(json.dumps({"losses": losses(), "embeddings": embeddings()}))
