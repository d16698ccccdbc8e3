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

from te_overrides.kernels.collectives.reference import (
    CollectiveError,
    all_reduce,
    check_sum_world,
    reduce_scatter,
)
from te_overrides.kernels.collectives.transport import group_size
from te_overrides.kernels.eager import eager_only


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
    """The groups of a sum over nodes. Collective over the whole job, as `torch.distributed.new_group` is.

    Args:
        group: the flat group; every rank of the job belongs to it.
        hosts: a name for each rank's node, in rank order.

    Raises:
        CollectiveError: see `require_neighbours`.
    """
    size = require_neighbours(hosts)
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    check_sum_world(len(ranks) // size)
    inside = [dist.new_group(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    across = [dist.new_group(ranks[number::size]) for number in range(size)]
    return Nodes(inside[own // size], across[own % size])


@eager_only
def all_reduce_over_nodes(x: torch.Tensor, nodes: Nodes) -> torch.Tensor:
    """The tree over all ranks of `x`, on every rank."""
    return all_reduce(all_reduce(x, nodes.inside), nodes.across)


@eager_only
def reduce_scatter_over_nodes(x: torch.Tensor, nodes: Nodes) -> torch.Tensor:
    """This rank's slice along dim 0 of the tree over all ranks.

    Args:
        x: [n, ...], n divisible by the number of ranks.

    Raises:
        CollectiveError: dim 0 that the ranks do not divide.
    """
    inside, across = group_size(nodes.inside), group_size(nodes.across)
    if x.shape[0] % (inside * across):
        raise CollectiveError(
            f"reduce_scatter over {inside * across} ranks needs dim 0 divisible by it, got {tuple(x.shape)}."
        )
    # Slices of the ranks with one number, of all nodes, next to each other: [number, node, slice].
    share = x.shape[0] // (inside * across)
    by_number = x.reshape(across, inside, share, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return reduce_scatter(reduce_scatter(by_number, nodes.inside), nodes.across)
