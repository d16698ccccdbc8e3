"""Matrix products of the contract in plain torch (docs/numbers.md, "Lane chain", "Eight lanes").

Every product of the model is one of two shapes:

* ``one_lane``: one float32 chain over all of K, rounded once to the output dtype;
* ``lane_tree``: K cut into equal lanes, each one chain rounded to the lane dtype, the lanes added by the balanced
  tree. A tensor-parallel rank holds a run of consecutive lanes and computes their subtree.

A chain is written with elementwise operations on purpose: a BLAS picks its blocking, and with it the order of the
sum, from M, N, K and the thread count. Here an element is a function of its row, its column and K, and of nothing
else; a product and a sum are two separately rounded float32 operations, so nothing can contract them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_overrides.kernels import accounting
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.tree.reference import balanced_tree

LANES = 8
"""Lanes of a tensor-parallel contraction: the largest TP degree. A power of two, so that a rank holds a subtree."""

# Elements of one accumulator block: accumulator and product stay in a core's private cache.
_BLOCK_ELEMENTS = 32768


class LaneError(ValueError):
    """A contraction cannot be cut into the contract's lanes."""


@eager_only
def chain(
    a: torch.Tensor,  # [M, K]
    b: torch.Tensor,  # [N, K]
    start: torch.Tensor | None = None,  # [M, N] float32
) -> torch.Tensor:  # [M, N] float32
    """``acc = start; for k ascending: acc = round32(acc + round32(a[m, k] * b[n, k]))``.

    Args:
        a, b: operands of any floating dtype up to float32, on one device.
        start: accumulator to go on from (left untouched); zero if absent.

    Raises:
        LaneError: operands that are not two matrices with one K.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise LaneError(
            f"a chain contracts [M, K] with [N, K]; got {tuple(a.shape)} and {tuple(b.shape)}. "
            "Flatten tokens first and pass the weight as [out, in]."
        )
    (m, k_size), n = a.shape, b.shape[0]
    accounting.flops(m * n * k_size)
    acc = torch.zeros(m, n, dtype=torch.float32, device=a.device) if start is None else start.clone()
    columns_of_a = a.t().to(torch.float32).contiguous().unsqueeze(-1)  # [K, M, 1]
    columns_of_b = b.t().to(torch.float32).contiguous()  # [K, N]
    rows = max(1, _BLOCK_ELEMENTS // max(n, 1))
    for first in range(0, m, rows):
        block = acc[first : first + rows]
        product = torch.empty_like(block)
        for k in range(k_size):
            torch.mul(columns_of_a[k, first : first + rows], columns_of_b[k], out=product)
            block.add_(product)
    return acc


@eager_only
def one_lane(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``A @ B^T`` as one chain, rounded once to `dtype` (default: the dtype of `a`). Shapes as in `chain`."""
    return chain(a, b).to(dtype or a.dtype)


def lane_dtype(activations: torch.dtype, fp32_lanes: bool = False) -> torch.dtype:
    """The dtype that a lane is rounded to: the activations' own, float32 on request."""
    return torch.float32 if fp32_lanes else activations


def lanes_per_rank(tp_size: int, lanes: int = LANES) -> int:
    """Lanes that one of `tp_size` ranks holds.

    Raises:
        LaneError: `tp_size` does not divide `lanes`.
    """
    if tp_size < 1 or lanes % tp_size:
        raise LaneError(
            f"tensor parallel size {tp_size} does not divide the {lanes} lanes of the numbers contract: a rank must "
            f"hold whole lanes. Use TP 1, 2, 4 or 8."
        )
    return lanes // tp_size


def cut_lanes(k_size: int, count: int, what: str = "K") -> list[slice]:
    """`count` equal slices of a rank's K.

    Raises:
        LaneError: `count` does not divide `k_size`.
    """
    if k_size % count:
        raise LaneError(
            f"{what} = {k_size} on this rank is not divisible by its {count} lanes: the contraction needs equal "
            f"lanes at every tensor-parallel degree. Pad {what} to a multiple of {count} on each rank."
        )
    width = k_size // count
    return [slice(i * width, (i + 1) * width) for i in range(count)]


@eager_only
def lane_tree(
    a: torch.Tensor,  # [M, K of this rank]
    b: torch.Tensor,  # [N, K of this rank]
    *,
    tp_size: int,
    dtype: torch.dtype | None = None,
    segments: Sequence[int] | None = None,
    lanes: int = LANES,
) -> torch.Tensor:  # [M, N] in the lane dtype
    """This rank's subtree of the eight-lane contraction ``A @ B^T``.

    Args:
        tp_size: ranks that share the contraction; this one holds ``lanes / tp_size`` consecutive lanes.
        dtype: lane dtype, default the dtype of `a`. The tree adds in it.
        segments: sizes of the packed parts of K (``[gate, up]``); lane i is slice i of every segment, chained in
            the order of the segments. Default: one segment.

    Raises:
        LaneError: a size that the lanes do not divide.
    """
    count = lanes_per_rank(tp_size, lanes)
    sizes = list(segments) if segments is not None else [a.shape[1]]
    if sum(sizes) != a.shape[1]:
        raise LaneError(f"segments {sizes} do not add up to K = {a.shape[1]}")
    cuts = [cut_lanes(size, count) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    out = []
    for lane in range(count):
        acc: torch.Tensor | None = None
        for begin, segment in zip(starts, cuts, strict=True):
            part = slice(begin + segment[lane].start, begin + segment[lane].stop)
            acc = chain(a[:, part], b[:, part], acc)
        assert acc is not None
        out.append(acc.to(dtype or a.dtype))
    return balanced_tree(out)
