"""The sum of gradient buckets over data-parallel and context-parallel ranks, in one order.

Megatron adds both in one group. Over context parallelism the sum is exact: one rank owns an element, the others hold
+0 (`ownership.py`), and x + 0 is x. Over data parallelism it is the balanced tree in data-parallel rank order. An
element's sum depends on its own terms alone, so it is the same in every bucket of every size, in an all-reduce and in a
reduce-scatter.

Why the balanced tree over the ranks of the common group is the tree over data-parallel ranks, where both degrees are
powers of two: number the ranks of the group by bits. Level k of the tree adds ranks that differ in bit k alone, lowest
first. Megatron numbers the group as a mesh, so every bit belongs to one of the two. On a level of context parallelism
at most one of each pair of terms is not +0, and the pair's sum is that term. What is left are the levels of data
parallelism, in their order: the tree over data-parallel ranks. Nothing here needs to know which bit is whose.

With another number of context-parallel ranks the levels no longer fall apart (over 4 x 3 ranks the pairs straddle
data-parallel ranks), so the terms of a data-parallel rank are added first. That needs the mesh, which `mesh_of` reads
off the groups.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from patches.errors import NotCoveredError
from te_overrides.kernels.collectives.agreement import require_agreement
from te_overrides.kernels.collectives.reference import (
    SUM_WORLDS,
    Sum,
    start_all_reduce,
    start_reduce_scatter_many,
)
from te_overrides.kernels.collectives.transport import group_size, start_all_gather, start_all_to_all
from te_overrides.kernels.tree.reference import balanced_tree

PIECE = 1 << 24
"""Elements that travel at once where a bucket is added at one go: without overlap a bucket may hold a whole model.
Bounds memory; cannot change a bit, since an element's sum does not know where it lies."""


@dataclass(frozen=True)
class Mesh:
    """Which ranks of a group hold parts of one data-parallel rank's gradients.

    `parts[d]`: the group ranks of data-parallel rank d.
    """

    parts: tuple[tuple[int, ...], ...]

    def add(self, terms: Sequence[torch.Tensor], wide: bool) -> torch.Tensor:
        """Terms in group-rank order: first the parts of each data-parallel rank (exact), then the balanced tree."""
        dtype = terms[0].dtype
        terms = [term.to(torch.float32) for term in terms] if wide else terms
        return balanced_tree([balanced_tree([terms[rank] for rank in part]) for part in self.parts]).to(dtype)


def mesh_of(group_ranks: Sequence[int], cp_ranks: Sequence[int]) -> Mesh:
    """The mesh of a group of data-parallel times context-parallel ranks.

    Args:
        group_ranks: global ranks of the group, in group order.
        cp_ranks: global ranks of this rank's context-parallel group, in its order.

    Raises:
        NotCoveredError: data-parallel ranks that are no power of two; groups that form no mesh.
    """
    size, cp = len(group_ranks), len(cp_ranks)
    dp = size // cp
    if dp not in SUM_WORLDS:
        raise NotCoveredError(
            f"gradients were about to be added over {dp} data-parallel ranks (a group of {size}, context parallelism "
            f"{cp}): the balanced tree of the numbers contract is defined over 1, 2, 4, 8, … of them. Choose a number "
            "of ranks that makes the data-parallel degree a power of two."
        )
    inner = tuple(tuple(range(d * cp, (d + 1) * cp)) for d in range(dp))
    outer = tuple(tuple(range(d, size, dp)) for d in range(dp))
    mine = tuple(group_ranks.index(rank) for rank in cp_ranks if rank in group_ranks)
    for parts in (inner, outer):
        if mine in parts:
            return Mesh(parts)
    raise NotCoveredError(
        f"the context-parallel group {list(cp_ranks)} is neither a run of neighbours nor every {dp}th rank of the "
        f"group {list(group_ranks)} that gradients are added over. Let megatron.core.parallel_state make both groups, "
        "or use degrees that are powers of two."
    )


def _mesh(group: dist.ProcessGroup) -> Mesh | None:
    """None where the plain tree over the group is right."""
    if group_size(group) in SUM_WORLDS:
        return None
    from megatron.core import parallel_state

    ranks = dist.get_process_group_ranks(group)
    cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
    return mesh_of(ranks, [dist.get_rank()] if cp_group is None else dist.get_process_group_ranks(cp_group))


def _start_over_mesh(
    buckets: Sequence[torch.Tensor], group: dist.ProcessGroup, mesh: Mesh, shards: Any, wide: bool
) -> Sum:
    outs = list(buckets) if shards is None else list(shards)
    under_way = []
    for bucket in buckets:
        line = (
            f"gradient bucket of {bucket.dtype} {tuple(bucket.shape)}, scattered {shards is not None}, {wide}"
        )
        require_agreement(line, group, bucket.device)
        if shards is None:
            under_way.append(start_all_gather(bucket, group, agreed=True))
        else:
            under_way.append(start_all_to_all(list(bucket.chunk(group_size(group))), group, agreed=True))

    def finish() -> list[torch.Tensor]:
        arrived = [moving.wait() for moving in under_way]
        return [out.copy_(mesh.add(terms, wide)) for out, terms in zip(outs, arrived, strict=True)]

    return Sum(finish)


def start_gradient_sums(
    buckets: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    shards: Sequence[torch.Tensor] | None = None,
    wide: bool = False,
) -> list[Sum]:
    """Start adding buckets over `group`; the results are in place when every returned sum was waited for.

    Args:
        buckets: [n], or [ranks, n / ranks], any floating dtype; not to be written before the sums were waited for.
        group: data-parallel times context-parallel ranks.
        shards: for every bucket this rank's n / ranks elements of it ([n / ranks], or [1, n / ranks]): only they
            receive their sum, the rest of the bucket keeps what it held. Without it every bucket receives its sum.
        wide: add in float32 and round once.

    Raises:
        NotCoveredError: data-parallel ranks that are no power of two; groups that form no mesh.
        DisagreementError: ranks that call with other shapes or dtypes.
    """
    if group_size(group) == 1:
        return []
    mesh = _mesh(group)
    if mesh is not None:
        return [_start_over_mesh(buckets, group, mesh, shards, wide)]
    if shards is None:
        return [start_all_reduce(bucket, group, wide=wide, out=bucket) for bucket in buckets]
    return [start_reduce_scatter_many(buckets, group, wide=wide, outs=shards)]


def _pieces(
    bucket: torch.Tensor, shard: torch.Tensor | None, ranks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """A bucket in pieces of at most `PIECE` elements, each with its part of the shard: [ranks, m] and [1, m]."""
    if shard is None:
        for piece in bucket.split(PIECE):
            yield piece, None
        return
    rows, width = bucket.view(ranks, -1), max(1, PIECE // ranks)
    for start in range(0, rows.shape[1], width):
        cut = slice(start, start + width)
        yield rows[:, cut], shard[cut].unsqueeze(0)


def add_gradients(
    buckets: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    shards: Sequence[torch.Tensor] | None = None,
    wide: bool = False,
) -> None:
    """`start_gradient_sums` that returns when the sums are in place, in memory that does not grow with the bucket."""
    under_way: collections.deque[Sum] = collections.deque()
    for bucket, shard in zip(buckets, [None] * len(buckets) if shards is None else shards, strict=True):
        for piece, part in _pieces(bucket, shard, group_size(group)):
            under_way += start_gradient_sums(
                [piece], group, shards=None if part is None else [part], wide=wide
            )
            # While a piece is added, the next one is on its way.
            while len(under_way) > 1:
                under_way.popleft().wait_all()
    for each in under_way:
        each.wait_all()


def require_consecutive_instances(
    group: dist.ProcessGroup, between: dist.ProcessGroup, whole: dist.ProcessGroup
) -> None:
    """The tree inside optimizer instances, then between them, is the tree over all ranks only for runs of 2^k ranks.

    Args:
        group: this rank's optimizer instance.
        between: the ranks at this place of every instance.
        whole: all data-parallel times context-parallel ranks.

    Raises:
        NotCoveredError: instances of other shapes.
    """
    size, instances = group_size(group), group_size(between)
    ranks, all_ranks = dist.get_process_group_ranks(group), dist.get_process_group_ranks(whole)
    runs = [all_ranks[start : start + size] for start in range(0, len(all_ranks), size)]
    if size not in SUM_WORLDS or instances not in SUM_WORLDS or len(runs) != instances or ranks not in runs:
        raise NotCoveredError(
            f"num_distributed_optimizer_instances={instances} with {size} ranks in an instance, {ranks} of "
            f"{all_ranks}: the sum over instances has the order of the sum over all ranks only where an instance is a "
            "run of neighbours and both numbers are powers of two. Use one instance, or such numbers."
        )
