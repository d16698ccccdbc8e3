"""What a rank does in a cell of the collectives' benchmark: bits, then every implementation in turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.collectives import reference
from te_overrides.kernels.collectives.transport import all_gather
from te_overrides.kernels.tree.reference import balanced_tree

SHARED_MEMORY = "ours, shared memory"


def measure(rank: int, world: int, operation: str, size: int, device: str, repeats: int) -> dict[str, Any]:
    """``ms`` of the slowest rank, and how many elements of ours differ from the tree over ranks.

    Args:
        operation: reduce_scatter, all_reduce or all_gather, of bfloat16.
        size: bytes of one rank's operand.
    """
    count = size // 2 // world * world
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, generator=generator).bfloat16().to(device)
    group = dist.group.WORLD
    assert group is not None
    functions: dict[str, Callable[[], torch.Tensor]] = {
        "library": _library(operation, x, world),
        "ours": _ours(operation, x, group),
    }
    if device == "cuda":
        functions[SHARED_MEMORY] = _shared_memory(operation, x, world, group)
    everybody = all_gather(x, group)
    want = torch.cat(everybody) if operation == "all_gather" else balanced_tree(everybody)
    if operation == "reduce_scatter":
        want = want.chunk(world)[rank]
    found = [count_mismatches(f(), want)[:2] for name, f in functions.items() if name != "library"]
    counted = torch.tensor([sum(f[0] for f in found), sum(f[1] for f in found)], device=device)
    dist.all_reduce(counted)
    ms = torch.tensor(_medians(functions, device, repeats), device=device)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return {
        "ms": dict(zip(functions, ms.tolist(), strict=True)),
        "mismatched": int(counted[0]),
        "compared": int(counted[1]),
    }


def _library(operation: str, x: torch.Tensor, world: int) -> Callable[[], torch.Tensor]:
    """The library's own collective, its sum in an order of its own."""
    if operation == "all_gather":
        out = x.new_empty(world * x.numel())
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: (gather(out, x), out)[1]
    if operation == "all_reduce":
        out = x.clone()
        return lambda: (dist.all_reduce(out.copy_(x)), out)[1]
    out = x.new_empty(x.numel() // world)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return lambda: (scatter(out, x), out)[1]


def _ours(operation: str, x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    if operation == "all_gather":
        return lambda: torch.cat(all_gather(x, group))
    return lambda: getattr(reference, operation)(x, group)


def _shared_memory(
    operation: str, x: torch.Tensor, world: int, group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    from te_overrides.kernels.collectives import peer

    size = x.numel() * x.element_size()
    space = peer.SymmetricWorkspace(group, cap=max(size, 1 << 20))
    parts = {"all_gather": x.numel() * world, "all_reduce": x.numel(), "reduce_scatter": x.numel() // world}
    out = x.new_empty(parts[operation])
    call = getattr(peer, operation)
    return lambda: (call(x, out, space.of(size)), out)[1]


def _medians(functions: dict[str, Callable[[], torch.Tensor]], device: str, repeats: int) -> list[float]:
    """Milliseconds; every rank takes the implementations in the same order, another one each round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    order, shuffle = list(functions), random.Random(0).shuffle
    for repeat in range(repeats + 3):
        shuffle(order)
        for name in order:
            took = _once(functions[name], device)
            if repeat >= 3:
                times[name].append(took)
    return [statistics.median(times[name]) for name in functions]


def _once(function: Callable[[], torch.Tensor], device: str) -> float:
    dist.barrier()
    if device == "cpu":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
