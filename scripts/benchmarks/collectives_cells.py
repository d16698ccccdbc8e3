"""What a rank does in a cell of the collectives' benchmark: bits, then every implementation in turn.

Every implementation does the same work: it writes into memory that was there before, an all-reduce into its own
operand. Operands are random numbers, put back before each call, outside the measured time: an operand that is summed in
place again and again would leave the range of bfloat16, and one that is copied inside the time costs one implementation
alone.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.collectives import reference, selection
from te_overrides.kernels.collectives.selection import TABLE, Row
from te_overrides.kernels.collectives.transport import all_gather
from te_overrides.kernels.tree.reference import balanced_tree

LANES = 2
"""Tensors of `reduce_scatter_many`, each of the cell's bytes."""
WARM = 3


@dataclass
class Implementation:
    """One way to do a cell's operation.

    Attributes:
        call: what is measured.
        outs: what it writes.
        prepare: what comes before each call, not measured.
        held: bytes that it keeps between calls and that torch's allocator does not count.
    """

    call: Callable[[], Any]
    outs: list[torch.Tensor]
    prepare: Callable[[], Any] = lambda: None
    held: Callable[[], int] = field(default=lambda: 0)


def moved(operation: str, size: int, world: int) -> int:
    """Bytes S of the algorithm bandwidth S / t, as nccl-tests defines it (doc/PERFORMANCE.md): the larger one of a
    rank's operand and result."""
    return size * {"all_gather": world, "reduce_scatter_many": LANES}.get(operation, 1)


def transports(operation: str, world: int, size: int, device: str) -> dict[str, Row]:
    """Entries of the table for a sum, beside the one that serves it by default, that can carry it on one machine."""
    if operation == "all_gather":
        return {}
    of = operation.removesuffix("_many")
    total = moved(operation, size, world)
    default = selection.look_up(selection.SETTINGS[0], of, world, total)
    found: dict[str, Row] = {}
    for row in TABLE:
        # Where an entry begins to serve is what is to be found out; where it ends is what it can carry.
        able = row.operation == of and (row.most_bytes is None or total <= row.most_bytes)
        name = row.transport
        if name == "nodes":
            able = able and world >= 4
            # Two of them: within a node by the group's library, or through shared memory.
            name = row.setting
        if "peers" in name:
            from te_overrides.kernels.collectives.peer import WORLDS

            sharing = world if name == "peers" else world // 2
            able = able and device == "cuda" and sharing in WORLDS and total <= selection.PEER_CAP
        if able and name != default:
            found.setdefault(name, row)
    return found


def implementations(
    operation: str, tensors: list[torch.Tensor], group: dist.ProcessGroup
) -> dict[str, Implementation]:
    """By name: the library's, ours as the table has it, ours by every other transport."""
    world, size, device = group.size(), tensors[0].nbytes, tensors[0].device.type
    # Half of the ranks count as one node and half as another: `nodes` on one machine has no network to cross.
    node = 2 * group.rank() // world
    selection.host_of_this_rank = lambda: f"half {node} of this machine"
    found = {
        "library": _library(operation, tensors, world),
        "ours": _ours(operation, tensors, group, None),
    }
    for name, row in transports(operation, world, size, device).items():
        found[f"ours, {name}"] = _ours(operation, tensors, group, row)
    if operation == "all_gather" and device == "cuda":
        found["ours, peers"] = _gathered_by_peers(tensors[0], world, group)
    return found


def measure(rank: int, world: int, operation: str, size: int, device: str, repeats: int) -> dict[str, Any]:
    """``ms`` and ``peak_extra`` by implementation, ``moved``, and how many elements of ours differ from the tree.

    Args:
        operation: reduce_scatter, reduce_scatter_many, all_reduce or all_gather, of bfloat16.
        size: bytes of one operand of one rank.
    """
    count = size // 2 // world * world
    generator = torch.Generator().manual_seed(rank)
    lanes = LANES if operation == "reduce_scatter_many" else 1
    tensors = [torch.randn(count, generator=generator).bfloat16().to(device) for _ in range(lanes)]
    group = dist.group.WORLD
    assert group is not None
    found = implementations(operation, tensors, group)
    counts = [_differ(f, wanted(operation, tensors, group)) for name, f in found.items() if name != "library"]
    counted = torch.tensor([sum(c[0] for c in counts), sum(c[1] for c in counts)], device=device)
    dist.all_reduce(counted)
    extra = {name: _peak(f) for name, f in found.items()} if device == "cuda" else {}
    ms = slowest(_times(found, device, repeats))
    leave()
    return {
        "ms": dict(zip(found, ms, strict=True)),
        "mismatched": int(counted[0]), "compared": int(counted[1]),
        "moved": moved(operation, tensors[0].nbytes, world), "peak_extra": extra,
    }  # fmt: skip


def leave() -> None:
    """The table and the environment as they were; the next cell's group is another one. Collective."""
    selection.TABLE = TABLE
    os.environ.pop(selection.VARIABLE, None)
    selection.close()


def wanted(operation: str, tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """What an implementation of ours has to write: the tree in plain torch over what all ranks had."""
    everybody = [all_gather(x, group) for x in tensors]
    if operation == "all_gather":
        return [torch.cat(everybody[0])]
    sums = [balanced_tree(terms) for terms in everybody]
    return sums if operation == "all_reduce" else [x.chunk(group.size())[group.rank()] for x in sums]


def _differ(one: Implementation, want: list[torch.Tensor]) -> tuple[int, int]:
    for out in one.outs:
        out.fill_(torch.nan)
    one.prepare()
    one.call()
    counts = [count_mismatches(got, x)[:2] for got, x in zip(one.outs, want, strict=True)]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


def _outs(operation: str, tensors: list[torch.Tensor], world: int) -> list[torch.Tensor]:
    times = {"all_gather": world, "all_reduce": 1}
    return [x.new_empty(int(x.numel() * times.get(operation, 1 / world))) for x in tensors]


def _library(operation: str, tensors: list[torch.Tensor], world: int) -> Implementation:
    """The library's own collective, its sum in an order of its own."""
    outs = _outs(operation, tensors, world)
    if operation == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return Implementation(lambda: gather(outs[0], tensors[0]), outs)
    if operation == "all_reduce":
        # It has no other form.
        return Implementation(lambda: dist.all_reduce(outs[0]), outs, lambda: outs[0].copy_(tensors[0]))
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return Implementation(lambda: [scatter(out, x) for out, x in zip(outs, tensors, strict=True)], outs)


def _ours(
    operation: str, tensors: list[torch.Tensor], group: dist.ProcessGroup, row: Row | None
) -> Implementation:
    """By the table, or by one entry of it in front of all others."""
    outs = _outs(operation, tensors, group.size())
    if operation == "all_gather":
        return Implementation(lambda: torch.cat(all_gather(tensors[0], group), out=outs[0]), outs)
    setting = row.setting if row else selection.SETTINGS[0]
    table = TABLE
    if row:
        # For this number of ranks alone: the sums inside and across nodes have fewer, and the table as it is.
        table = (
            Row(setting, row.operation, row.transport, group.size(), most_bytes=row.most_bytes),
            *TABLE,
        )

    def prepare() -> None:
        os.environ[selection.VARIABLE] = setting
        selection.TABLE = table
        if operation == "all_reduce":
            outs[0].copy_(tensors[0])

    def call() -> None:
        if operation == "all_reduce":
            reference.all_reduce(outs[0], group, out=outs[0])
        elif operation == "reduce_scatter":
            reference.reduce_scatter(tensors[0], group, out=outs[0])
        else:
            reference.reduce_scatter_many(tensors, group, outs=outs)

    one = Implementation(call, outs, prepare)
    if row and row.transport == "peers":
        one.held = lambda: _workspace(tensors[0].nbytes, group)
    elif row and row.setting == "nodes+peers":
        one.held = lambda: _workspace(tensors[0].nbytes, selection.nodes_of_group(group).inside)
    return one


def _gathered_by_peers(x: torch.Tensor, world: int, group: dist.ProcessGroup) -> Implementation:
    """The table has sums alone; shared memory gathers too."""
    from te_overrides.kernels.collectives import peer

    outs = _outs("all_gather", [x], world)
    space = peer.SymmetricWorkspace(group, cap=max(x.nbytes, 1 << 20))
    return Implementation(
        lambda: peer.all_gather(x, outs[0], space.of(x.nbytes)), outs,
        held=lambda: 2 * space.of(x.nbytes).half_bytes,
    )  # fmt: skip


def _workspace(size: int, group: dist.ProcessGroup | None) -> int:
    assert group is not None
    return 2 * selection.peers_of(group)[0].of(size).half_bytes


def _peak(one: Implementation) -> int:
    """Bytes of this rank beyond operands and results: the most that torch's allocator gave during a call, and what is
    held between calls. The library's own buffers are not among them: NCCL and RCCL tell nobody."""
    one.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one.call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + one.held()


def _times(found: dict[str, Implementation], device: str, repeats: int) -> torch.Tensor:
    """[implementations, repeats] milliseconds; every rank takes them in the same order, another one each round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    order, shuffle = list(found), random.Random(0).shuffle
    for repeat in range(repeats + WARM):
        shuffle(order)
        for name in order:
            found[name].prepare()
            took = _once(found[name].call, device)
            if repeat >= WARM:
                times[name].append(took)
    return torch.tensor([times[name] for name in found], dtype=torch.float64, device=device)


def slowest(times: torch.Tensor) -> list[float]:
    """Medians over calls of the rank that was slowest in each. times: [implementations, repeats] of this rank."""
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [statistics.median(row) for row in times.tolist()]


def _once(call: Callable[[], Any], device: str) -> float:
    dist.barrier()
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
