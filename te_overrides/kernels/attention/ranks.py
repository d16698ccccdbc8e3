"""Context-parallel ranks in one order, whether one process group holds them or two levels of groups do.

TransformerEngine's `a2a+p2p` hands over two groups, `[inner, outer]`: the inner ones (all-to-all, usually inside a
node) hold consecutive ranks of the flat context-parallel group, an outer one holds every inner group's rank of one
index. The flat rank is therefore `outer rank * inner size + inner rank`. Gathering over the inner group and then over
the outer one brings the pieces in that order, without a flat group, which no rank could make alone.

That the two levels form one order is checked against the flat list of global ranks; what does not is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from te_overrides.kernels.attention.reference import AttentionError
from te_overrides.kernels.collectives.transport import group_rank, group_size


@dataclass(frozen=True)
class Levels:
    """Two levels of groups that together hold the context-parallel ranks, outer rank first.

    Attributes:
        inner: group of consecutive ranks.
        outer: group of the ranks that have this rank's index inside their inner group.
    """

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup

    @classmethod
    def of(cls, groups: Sequence[dist.ProcessGroup], global_ranks: Sequence[int]) -> Levels:
        """From TransformerEngine's `cp_group` list and `cp_global_ranks`.

        Args:
            groups: `[inner, outer]`.
            global_ranks: global ranks of all context-parallel ranks, in order.

        Raises:
            AttentionError: other than two groups, or groups that do not lie in `global_ranks` as described above.
        """
        if len(groups) != 2:
            raise AttentionError(
                f"a hierarchical context-parallel group of {len(groups)} levels: two are covered, [inner, outer]"
            )
        inner, outer = groups
        size, ranks = group_size(inner), list(global_ranks)
        want = (
            ranks[group_rank(outer) * size : (group_rank(outer) + 1) * size],
            ranks[group_rank(inner) :: size],
        )
        found = tuple(dist.get_process_group_ranks(group) for group in (inner, outer))
        if found != want:
            raise AttentionError(
                f"the hierarchical context-parallel groups hold the global ranks {found[0]} (inner) and {found[1]} "
                f"(outer); with the flat order {ranks} they would be {want[0]} and {want[1]}. Where a rank's tokens "
                "lie in the sequence cannot be derived from them: build the inner groups of consecutive ranks, as "
                "megatron.core.parallel_state does, or use cp_comm_type p2p, all_gather or a2a."
            )
        return cls(inner, outer)


Ranks = dist.ProcessGroup | Levels | None
"""Who shares a sequence; None is one rank."""


def levels_of(ranks: Ranks) -> list[dist.ProcessGroup]:
    """Groups to gather over, one after the other, the innermost first; empty for one rank."""
    groups = [ranks.inner, ranks.outer] if isinstance(ranks, Levels) else [ranks]
    return [group for group in groups if group is not None and group_size(group) > 1]


def cp_size_of(ranks: Ranks) -> int:
    """Number of context-parallel ranks."""
    if isinstance(ranks, Levels):
        return group_size(ranks.inner) * group_size(ranks.outer)
    return group_size(ranks)


def cp_rank_of(ranks: Ranks) -> int:
    """This process's rank among them."""
    if isinstance(ranks, Levels):
        return group_rank(ranks.outer) * group_size(ranks.inner) + group_rank(ranks.inner)
    return group_rank(ranks)
