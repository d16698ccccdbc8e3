"""Sums over several nodes with the bits of one flat sum: the node's subtree first, then the upper levels across nodes.

A tree over a power of two nests, so where a node's ranks are neighbours in rank order and their number is a power of
two, a node's sum is a subtree, and the sum over nodes in node order finishes the tree. Between nodes travels one node's
share instead of every rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives.agreement import require_agreement
from te_overrides.kernels.collectives.groups import backend_of, timeout_of
from te_overrides.kernels.collectives.reference import (
    CollectiveError,
    Sum,
    check_sum_world,
    start_all_reduce,
    start_reduce_scatter_many,
)
from te_overrides.kernels.collectives.transport import group_size


@dataclass(frozen=True)
class Nodes:
    """Groups of a flat group whose ranks lie on several nodes.

    Attributes:
        inside: this rank's node, in rank order.
        across: the ranks with this rank's number inside their nodes, in node order.
    """

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


def require_neighbours(hosts: Sequence[str]) -> int:
    """Ranks a node, of hosts in rank order.

    Raises:
        CollectiveError: nodes of different sizes, a size that is no power of two, ranks of a node that are apart.
    """
    size = next((i for i, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    check_sum_world(size)
    for start in range(0, len(hosts), size):
        node = list(hosts[start : start + size])
        elsewhere = [i for i, host in enumerate(hosts) if host == node[0] and not start <= i < start + size]
        if len(set(node)) > 1 or len(node) < size or elsewhere:
            raise CollectiveError(
                f"ranks {start} to {start + len(node) - 1} lie on {sorted(set(node))}, ranks {elsewhere} too "
                f"on {node[0]}: a sum over nodes has the bits of the flat one only where every node holds {size} "
                "neighbours. Order the ranks by node, or sum over the flat group."
            )
    return size


def nodes_of(group: dist.ProcessGroup, hosts: Sequence[str]) -> Nodes:
    """The groups of a sum over nodes, with the backend and the timeout of `group`: a dead rank ends their calls as
    soon as it ends the flat group's. Collective over `group`, and over no other ranks.

    Args:
        group: the flat group.
        hosts: a name for each rank's node, in rank order.

    Raises:
        CollectiveError: see `require_neighbours`.
    """
    size = require_neighbours(hosts)
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    check_sum_world(len(ranks) // size)
    node, number = divmod(own, size)
    inside, across = (
        dist.new_group(
            members, timeout=timeout_of(group), backend=backend_of(group), use_local_synchronization=True
        )
        for members in (ranks[node * size : (node + 1) * size], ranks[number::size])
    )
    return Nodes(inside, across)


def _terms(x: torch.Tensor, wide: bool) -> torch.Tensor:
    """`x`, in float32 where additions are: between the levels nothing may be rounded then."""
    return x.detach().to(torch.float32) if wide else x.detach()


def _finished(total: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    total = total.to(dtype)
    return total if out is None else out.copy_(total)


def _require_order(nodes: Nodes, number: int, device: torch.device) -> None:
    """The upper levels begin at the wait: ranks that wait in another order would add other sums."""
    if nodes.across is not None and group_size(nodes.across) > 1:
        require_agreement("the upper levels", nodes.across, device, continues=number)


def start_all_reduce_over_nodes(
    x: torch.Tensor, nodes: Nodes, number: int, *, wide: bool = False, out: torch.Tensor | None = None
) -> Sum:
    """The tree over all ranks of `x`, on every rank.

    Args:
        number: of this sum in the flat group (`agreement.require_agreement`). Others as for
            `reference.start_all_reduce`.
    """
    moving = start_all_reduce(_terms(x, wide), nodes.inside)

    def finish() -> list[torch.Tensor]:
        _require_order(nodes, number, x.device)
        return [_finished(start_all_reduce(moving.wait(), nodes.across).wait(), x.dtype, out)]

    return Sum(finish)


def start_reduce_scatter_over_nodes(
    tensors: Sequence[torch.Tensor], nodes: Nodes, number: int, *, wide: bool = False,
    outs: Sequence[torch.Tensor | None] | None = None,
) -> Sum:  # fmt: skip
    """This rank's slice along dim 0 of the tree over all ranks, for each tensor.

    Args:
        tensors: [n, ...], n divisible by the number of ranks.
        number: of this sum in the flat group. Others as for `reference.start_reduce_scatter_many`.
    """
    inside, across = group_size(nodes.inside), group_size(nodes.across)
    # Slices of the ranks with one number, of all nodes, next to each other: [number, node, slice].
    by_number = []
    for x in tensors:
        share = x.shape[0] // (inside * across)
        rows = _terms(x, wide).reshape(across, inside, share, *x.shape[1:])
        by_number.append(rows.transpose(0, 1).reshape(x.shape))
    moving = start_reduce_scatter_many(by_number, nodes.inside)
    given = [None] * len(tensors) if outs is None else list(outs)

    def finish() -> list[torch.Tensor]:
        _require_order(nodes, number, tensors[0].device)
        totals = start_reduce_scatter_many(moving.wait_all(), nodes.across).wait_all()
        return [_finished(total, x.dtype, out) for total, x, out in zip(totals, tensors, given, strict=True)]

    return Sum(finish)
