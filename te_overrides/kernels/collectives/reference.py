"""Sums over ranks in one order: bytes move in rank order, a local balanced tree adds (docs/numbers.md, "Collectives").

The library's own all-reduce picks ring, tree or recursive halving by size and topology, and its chunking by the
buffer a tensor happens to lie in; with it goes the order of the sum. Here a collective only moves bytes. What is
added is added by every rank alike: the balanced tree in rank order, one rounding per add in the payload's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives.transport import all_gather, all_to_all, group_rank, group_size
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.tree.reference import balanced_tree


class CollectiveError(ValueError):
    """A collective was asked for something the contract does not define."""


def check_sum_world(size: int) -> None:
    """Sums are defined over a power of two of ranks, so that a rank's share is a whole subtree.

    Raises:
        CollectiveError: any other size.
    """
    if size < 1 or size & (size - 1):
        raise CollectiveError(
            f"a fixed-tree sum over {size} ranks was asked for; the balanced tree of the numbers contract is defined "
            f"over 1, 2, 4, 8, … ranks. Choose a power of two as the tensor-parallel degree."
        )


@eager_only
def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The balanced tree over ranks of `x`. Any shape and floating dtype; returns a new tensor on every rank.

    Raises:
        CollectiveError: a world size that is no power of two.
    """
    check_sum_world(group_size(group))
    if group_size(group) == 1:
        return x
    return balanced_tree(all_gather(x, group))


@eager_only
def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's slice along dim 0 of the balanced tree over ranks. A rank receives its own slice alone.

    Raises:
        CollectiveError: a world size that is no power of two, or dim 0 that it does not divide.
    """
    size = group_size(group)
    check_sum_world(size)
    if size == 1:
        return x
    if x.shape[0] % size:
        raise CollectiveError(
            f"reduce_scatter over {size} ranks needs dim 0 divisible by {size}, got {tuple(x.shape)}: pad the "
            f"sequence so that the tensor-parallel degree divides it."
        )
    return balanced_tree(all_to_all(list(x.contiguous().chunk(size, dim=0)), group))


def gather_first_dim(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenation along dim 0 in rank order."""
    return x if group_size(group) == 1 else torch.cat(all_gather(x, group), dim=0)


def even_cuts(size: int, parts: int) -> list[slice]:
    """`parts` consecutive slices of `size`, as even as possible, the first ones one longer."""
    base, extra = divmod(size, parts)
    cuts, start = [], 0
    for i in range(parts):
        stop = start + base + (1 if i < extra else 0)
        cuts.append(slice(start, stop))
        start = stop
    return cuts


@eager_only
def exchange_columns(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], slice]:
    """All-to-all by columns: every rank's `x` restricted to the columns of its last dim that this rank owns.

    Args:
        x: [..., C], the same shape on every rank.

    Returns:
        One tensor [..., C_own] per source rank, in rank order, and the slice of columns owned here.
    """
    size = group_size(group)
    cuts = even_cuts(x.shape[-1], size)
    own = cuts[group_rank(group)]
    if size == 1:
        return [x], own
    # A transport moves equal pieces: short slices travel with a column of zeros that the owner drops.
    width = max(cut.stop - cut.start for cut in cuts)
    pieces = []
    for cut in cuts:
        piece = x[..., cut]
        short = width - piece.shape[-1]
        pieces.append(torch.nn.functional.pad(piece, (0, short)) if short else piece)
    received = all_to_all([p.contiguous() for p in pieces], group)
    return [r[..., : own.stop - own.start] for r in received], own


@eager_only
def owned(values: torch.Tensor, own: slice, size: int, dim: int = -1) -> torch.Tensor:
    """Zeros of `size` along `dim` with `values` at `own`: what a rank hands to a later sum over ranks."""
    shape = list(values.shape)
    shape[dim] = size
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    out.narrow(dim, own.start, own.stop - own.start).copy_(values)
    return out


def select_contribution(values: Sequence[torch.Tensor], owner: torch.Tensor) -> torch.Tensor:
    """Per element, the value of the rank that `owner` names. `values`: one [...] tensor per rank; `owner`:
    [...] int64."""
    return torch.gather(torch.stack(list(values)), 0, owner.unsqueeze(0)).squeeze(0)
