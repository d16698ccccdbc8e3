"""Sums over nodes have the bits of the flat sum; ranks that are no neighbours are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits
from procs import run_ranks
from te_overrides.kernels.collectives.nodes import (
    all_reduce_over_nodes,
    nodes_of,
    reduce_scatter_over_nodes,
    require_neighbours,
)
from te_overrides.kernels.collectives.reference import CollectiveError, all_reduce, reduce_scatter


def compare(rank: int, world: int, sizes: tuple[int, ...], per_node: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    nodes = nodes_of(group, [f"node {r // per_node}" for r in range(world)])
    generator = torch.Generator().manual_seed(rank)
    for size in sizes:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(size * world, 3, generator=generator).to(dtype)
            assert_equal_bits(
                all_reduce_over_nodes(x, nodes), all_reduce(x, group), f"all_reduce {size} {dtype}"
            )
            assert_equal_bits(
                reduce_scatter_over_nodes(x, nodes),
                reduce_scatter(x, group),
                f"reduce_scatter {size} {dtype}",
            )


@pytest.mark.parametrize(("world", "per_node"), [(8, 4), (8, 2), (4, 2)])
def test_a_sum_over_nodes_has_the_bits_of_the_flat_one(world: int, per_node: int) -> None:
    run_ranks(world, compare, (1, 33, 5), per_node)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["a", "b", "a", "b"], "Order the ranks by node"),
        (["a", "a", "b", "b", "b", "b"], "Order the ranks by node"),
        (["a", "a", "a", "b", "b", "b"], "3 ranks"),
    ],
)
def test_ranks_that_are_no_neighbours_are_refused(hosts: list[str], words: str) -> None:
    with pytest.raises(CollectiveError, match=words):
        require_neighbours(hosts)


def test_neighbours_are_counted() -> None:
    assert require_neighbours(["a"] * 8) == 8 and require_neighbours(["a", "a", "b", "b"]) == 2
