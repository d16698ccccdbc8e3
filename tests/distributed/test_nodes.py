"""The choice of a transport changes no bit; sums over nodes are the flat ones; what cannot work is refused by name."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bits import assert_equal_bits
from procs import run_ranks
from te_overrides.kernels.collectives import agreement, groups, peer, selection
from te_overrides.kernels.collectives.nodes import require_neighbours
from te_overrides.kernels.collectives.reference import (
    CollectiveError,
    Sum,
    all_reduce,
    reduce_scatter_many,
    start_all_reduce,
)
from te_overrides.kernels.collectives.transport import all_gather
from te_overrides.kernels.tree.reference import balanced_tree


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _sums(x: torch.Tensor, group: dist.ProcessGroup, wide: bool) -> list[torch.Tensor]:
    in_place, other = x.clone(), (x[..., :1] * 3).contiguous()
    all_reduce(in_place, group, wide=wide, out=in_place)
    out = torch.empty_like(x[: x.shape[0] // group.size()])
    scattered = reduce_scatter_many([x, other], group, wide=wide, outs=[out, None])
    assert scattered[0] is out
    return [in_place, start_all_reduce(x, group, wide=wide).wait(), *scattered]


def _compare_shared(rank: int, flat: dist.ProcessGroup) -> int:
    """`nodes+peers` over two nodes of two, with a stand-in for shared memory: it carries each node's sum, no other."""
    shared: list[list[int]] = []

    def by_peers(x: torch.Tensor, group: Any, _: Any, *, wide: bool, out: torch.Tensor | None) -> Sum:
        shared.append(dist.get_process_group_ranks(group))
        terms = all_gather(x.float() if wide else x, group)
        return Sum(lambda: [balanced_tree(terms).to(x.dtype)])

    x = torch.randn(37, generator=torch.Generator().manual_seed(rank)).bfloat16()
    os.environ.pop(selection.VARIABLE, None)
    want = [all_reduce(x, flat, wide=wide) for wide in (False, True)]
    os.environ[selection.VARIABLE] = "nodes+peers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "host_of_this_rank", lambda: f"node {rank // 2}")
        patch.setattr(selection, "_can_share", lambda x, ranks: True)
        patch.setattr(selection, "_require_peers", lambda x, group: None)
        patch.setattr(selection, "peers_of", lambda group: (group, None))
        patch.setattr(peer, "start_all_reduce_by_peers", by_peers)
        group = dist.new_group(list(range(4)))
        for wide, wanted in zip((False, True), want, strict=True):
            assert_equal_bits(all_reduce(x, group, wide=wide), wanted, f"nodes+peers wide {wide}")
    assert shared == [[rank // 2 * 2, rank // 2 * 2 + 1]] * 2
    return 2 * x.numel()


def _compare(rank: int, world: int, layouts: tuple[int, ...]) -> tuple[int, list[str]]:
    """Flat against `nodes`, with nodes of every size in `layouts`."""
    heard = _Lines()
    logger = logging.getLogger("te_overrides.kernels.collectives")
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    generator, compared = torch.Generator().manual_seed(rank), 0
    flat = dist.group.WORLD
    assert flat is not None
    groups = {per_node: dist.new_group(list(range(world))) for per_node in layouts}
    for size in (0, 1, 33):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(size * world, 3, generator=generator).to(dtype)
            for wide in (False, True):
                os.environ.pop(selection.VARIABLE, None)
                want = _sums(x, flat, wide)
                os.environ[selection.VARIABLE] = "nodes+peers" if size == 1 else "nodes"
                for per_node, group in groups.items():
                    selection.host_of_this_rank = lambda per_node=per_node: f"node {rank // per_node}"
                    for got, wanted in zip(_sums(x, group, wide), want, strict=True):
                        assert_equal_bits(got, wanted, f"{per_node} a node, {size} {dtype} wide {wide}")
                        compared += wanted.numel()
    with pytest.raises(CollectiveError, match="Order the ranks by node"):
        selection.host_of_this_rank = lambda: f"node {rank % 2}"
        all_reduce(torch.ones(3), dist.new_group(list(range(world))))
    for value, words in (("peers", "a tensor on cpu"), ("rccl", "one of group, nodes, peers, nodes")):
        os.environ[selection.VARIABLE] = value
        with pytest.raises(selection.SelectionError, match=words):
            all_reduce(torch.ones(3), flat)
    if world == 4:
        compared += _compare_shared(rank, flat)
    selection.close()
    assert not selection._known
    return compared, heard.lines


@pytest.mark.parametrize(("world", "layouts"), [(4, (1, 2, 4)), (8, (2, 4))])
def test_a_sum_over_nodes_has_the_bits_of_the_flat_one(world: int, layouts: tuple[int, ...]) -> None:
    """Every transport that four and eight gloo ranks can take; each choice is logged once."""
    for compared, lines in run_ranks(world, _compare, layouts):
        print(f"0 of {compared} elements differ")
        assert compared
        over_nodes = [line for line in lines if line.endswith(f": nodes ({selection.VARIABLE}=nodes)")]
        assert len(set(lines)) == len(lines) and len(over_nodes) == 2 * sum(1 < n < world for n in layouts)


def _made_and_gone(rank: int, world: int) -> tuple[list[str], int, list[str]]:
    """A group with a timeout of its own sums over nodes and is destroyed: what its node groups were made with, what was
    alive, and what still is."""
    selection.host_of_this_rank = lambda: f"node {rank // 2}"
    os.environ[selection.VARIABLE] = "nodes"
    torch_groups = len(distributed_c10d._world.pg_map)
    kept = len(agreement._calls), len(selection._known)
    flat = dist.new_group(list(range(world)), timeout=timedelta(seconds=77), backend="cpu:gloo")
    all_reduce(torch.ones(3), flat)
    nodes = selection.nodes_of_group(flat)
    made: list[weakref.ref[dist.ProcessGroup]] = [weakref.ref(flat)]
    found = []
    for group in (nodes.inside, nodes.across):
        assert group is not None and group.size() == 2
        found.append(f"{groups.timeout_of(group)} {groups.backend_of(group)}")
        made.append(weakref.ref(group))
    found.append(f"{groups.timeout_of(flat)} {groups.backend_of(flat)}")
    del nodes, group
    gc.collect()
    alive = sum(each() is not None for each in made)
    dist.barrier()
    dist.destroy_process_group(flat)
    del flat
    held = [str(each()) for each in made if each() is not None]
    held += ["a group of torch"] * (len(distributed_c10d._world.pg_map) - torch_groups)
    if (len(agreement._calls), len(selection._known)) != kept:
        held.append("an entry of ours")
    return found, alive, held


def test_groups_of_nodes_have_the_timeout_of_their_group_and_go_with_it() -> None:
    for found, alive, held in run_ranks(4, _made_and_gone):
        assert found == ["0:01:17 cpu:gloo"] * 3, found
        assert alive == 3 and not held, (alive, held)


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
