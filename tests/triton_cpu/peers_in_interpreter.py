"""Runs the peer-to-peer kernels in Triton's interpreter: one process a rank, real flags in memory that they share.

Started by tests as a process of its own with TRITON_INTERPRET=1; prints, as JSON, mismatches against the tree.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
import torch.multiprocessing as mp

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.collectives import peer
from te_overrides.kernels.collectives.peer_obstacles import PeerError
from te_overrides.kernels.tree.reference import balanced_tree

HALF = 1 << 16
ORDERS = list(itertools.permutations((1e8, 1.0, -1e8, 1.0)))


def inputs(world: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's operand, known to all."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=generator) * 3).to(dtype) for _ in range(world)]


def tree(terms: list[torch.Tensor], wide: bool) -> torch.Tensor:
    if not wide:
        return balanced_tree(terms)
    return balanced_tree([x.float() for x in terms]).to(terms[0].dtype)


def cases(rank: int, world: int, space: peer.Workspace) -> dict[str, list[int]]:
    """Calls of changing sizes, kinds and dtypes, one after the other: {name: [mismatches, elements]}."""
    counts: dict[str, list[int]] = {}

    def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        counts[name] = list(count_mismatches(got, want)[:2])

    sizes = (0, 1, 7, 1030) if world == 2 else (1, 515)
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if world < 8 else (torch.bfloat16,)
    for number, (size, dtype) in enumerate(itertools.product(sizes, dtypes)):
        wide = dtype == torch.bfloat16 and number % 2 == 0
        terms = inputs(world, size * world, dtype, number)
        # The same data inside a larger buffer, at an odd place.
        x = torch.cat([terms[rank].new_full((3,), torch.nan), terms[rank]])[3:]
        out = torch.full((size,), torch.nan, dtype=dtype)
        peer.reduce_scatter(x, out, space, wide=wide)
        compare(
            f"reduce_scatter {size} {dtype} wide {wide}",
            out,
            tree(terms, wide).chunk(world)[rank] if size else out,
        )
        for shared in (False, True):
            out = terms[rank].clone()
            peer.all_reduce(out, out, space, wide=wide, shared=shared)
            compare(f"all_reduce {size} {dtype} wide {wide} shared {shared}", out, tree(terms, wide))
        gathered = torch.full((size * world * world,), torch.nan, dtype=dtype)
        # Aligned otherwise on every rank.
        x = torch.cat([terms[rank].new_full((rank % 3,), torch.nan), terms[rank]])[rank % 3 :]
        peer.all_gather(x, gathered, space)
        compare(f"all_gather {size} {dtype}", gathered, torch.cat(terms))
    if world == 4:
        for number, order in enumerate(ORDERS):
            out = torch.empty(1)
            peer.all_reduce(torch.tensor([order[rank]]), out, space)
            compare(f"order {number}", out, balanced_tree([torch.tensor([v]) for v in order]))
    if rank == 0:
        counts["mutant"] = list(
            count_mismatches(sum(terms[1:], terms[0]).float(), tree(terms, False).float())[:2]  # type: ignore[arg-type]
        )
    return counts


def serve(rank: int, staging: Any, flags: Any, found: Any) -> None:
    torch.set_num_threads(1)
    space = peer.in_memory(rank, staging, flags, 1e6)
    found.put((rank, cases(rank, len(staging), space)))


def lone(staging: Any, flags: Any, found: Any) -> None:
    """A rank whose counterpart never comes."""
    space = peer.in_memory(0, staging, flags, 0.05)
    try:
        peer.all_reduce(torch.ones(4), torch.empty(4), space)
        peer.all_reduce(torch.ones(4), torch.empty(4), space)
    except PeerError as error:
        found.put(str(error))
        return
    found.put("no error")


def buffers(world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    staging = [torch.zeros(2 * HALF, dtype=torch.uint8).share_memory_() for _ in range(world)]
    flags = [torch.zeros(peer.flag_words(world), dtype=torch.int32).share_memory_() for _ in range(world)]
    return staging, flags


def main() -> None:
    context = mp.get_context("fork")
    report: dict[str, Any] = {}
    for world in map(int, sys.argv[1:]):
        staging, flags = buffers(world)
        found = context.SimpleQueue()
        ranks = [
            context.Process(target=serve, args=(r, staging, flags, found), daemon=True) for r in range(world)
        ]
        for process in ranks:
            process.start()
        report[str(world)] = dict(found.get() for _ in ranks)
        for process in ranks:
            process.join()
        report[f"{world} flags left"] = int(sum(int(table.sum()) for table in flags))
    found = context.SimpleQueue()
    process = context.Process(target=lone, args=(*buffers(2), found), daemon=True)
    process.start()
    report["lone"] = found.get()
    process.join()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
