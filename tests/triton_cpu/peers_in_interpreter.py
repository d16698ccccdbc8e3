"""Runs the peer-to-peer kernels in Triton's interpreter: one process a rank, real flags in memory that they share.

Started by tests as a process of its own with TRITON_INTERPRET=1; prints, as JSON, mismatches against the tree, and what
calls return, and how often they look at a flag, once a rank is missing.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from triton.runtime.interpreter import InterpreterBuilder

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


class Looks:
    """Counts every look at a flag; there is no other waiting. After one in vain others run: ranks outnumber cores."""

    def __init__(self) -> None:
        self.count = 0
        look = InterpreterBuilder.create_atomic_cas

        def counting(builder: Any, word: Any, expected: Any, *arguments: Any) -> Any:
            self.count += 1
            found = look(builder, word, expected, *arguments)
            if (found.data != expected.data).any():
                time.sleep(1e-4)
            return found

        InterpreterBuilder.create_atomic_cas = counting

    def of(self, call: Callable[[], None]) -> int:
        """Looks in a call."""
        before = self.count
        call()
        return self.count - before


def serve(rank: int, staging: Any, flags: Any, found: Any) -> None:
    torch.set_num_threads(1)
    Looks()
    space = peer.in_memory(rank, staging, flags, 1e6)
    found.put((rank, cases(rank, len(staging), space)))


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, peer.Workspace], None]] = {
    "reduce_scatter": lambda x, out, space: peer.reduce_scatter(x, out, space, programs=1),
    "all_reduce": lambda x, out, space: peer.all_reduce(x, out, space, shared=False, programs=1),
    "all_reduce in two phases": lambda x, out, space: peer.all_reduce(x, out, space, shared=True, programs=1),
    "all_gather": lambda x, out, space: peer.all_gather(x, out, space, programs=1),
}
LATER = 20
"""Calls after the one that misses a rank, as if they had been queued before anybody noticed."""


def in_vain(form: str, x: torch.Tensor, space: peer.Workspace, looks: Looks) -> dict[str, Any]:
    """A call that misses a rank and `LATER` more of them: numbers in their results, looks, staging they wrote."""
    share = {"reduce_scatter": 1 / space.world, "all_gather": space.world}.get(form, 1)
    outs = [torch.zeros(int(x.numel() * share), dtype=x.dtype) for _ in range(LATER + 1)]
    first = looks.of(lambda: FORMS[form](x, outs[0], space))
    staging, _ = space.held  # type: ignore[attr-defined]
    before = staging[space.rank].clone()
    later = looks.of(lambda: [FORMS[form](x * 2, out, space) for out in outs[1:]] and None)
    return {
        "missing": int(space.missing[0]), "looks": first, "later looks": later,
        "numbers": int((~outs[0].isnan()).sum()), "elements": outs[0].numel(),
        "later numbers": sum(int((~out.isnan()).sum()) for out in outs[1:]),
        "staged later": int((staging[space.rank] != before).sum()),
    }  # fmt: skip


def lone(found: Any) -> None:
    """A rank whose counterpart never comes, or comes to one meeting or one program only."""
    report: dict[str, Any] = {}
    try:
        space = peer.in_memory(0, *buffers(2), 0.05)
        peer.all_reduce(torch.ones(4), torch.empty(4), space)
        peer.all_reduce(torch.ones(4), torch.empty(4), space)
    except PeerError as error:
        report["error"] = str(error)
    peer.Workspace.require_everybody = lambda self: None  # type: ignore[method-assign]
    looks = Looks()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for form in FORMS:
            space = peer.in_memory(0, *buffers(2), 0.05)
            report[f"{form} of {dtype}"] = in_vain(form, torch.ones(1030, dtype=dtype), space, looks)
    space = peer.in_memory(0, *buffers(2), 0.05)
    staging, flags = space.held  # type: ignore[attr-defined]
    # Its word in our table for the first meeting, of the only program: [phase, program, from].
    flags[0][1] = 1
    report["missed in the second meeting"] = in_vain(
        "all_reduce in two phases", torch.ones(1030), space, looks
    )
    space = peer.in_memory(0, *buffers(2), 0.05)
    staging, flags = space.held  # type: ignore[attr-defined]
    flags[0][1] = 1
    # The first of two programs meets it and adds.
    out = torch.zeros(1030)
    peer.all_reduce(torch.ones(1030), out, space, shared=False, programs=2)
    report["numbers of a call that missed it in one of two programs"] = int((~out.isnan()).sum())
    found.put(report)


def survive(rank: int, tables: dict[str, Any], found: Any) -> None:
    """One of the ranks that are left when the last one never comes."""
    torch.set_num_threads(1)
    peer.Workspace.require_everybody = lambda self: None  # type: ignore[method-assign]
    looks = Looks()
    report = {}
    for form, (staging, flags) in tables.items():
        report[form] = in_vain(form, torch.ones(1028), peer.in_memory(rank, staging, flags, 2.0), looks)
    found.put((rank, report))


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
    process = context.Process(target=lone, args=(found,), daemon=True)
    process.start()
    report["lone"] = found.get()
    process.join()
    tables = {form: buffers(4) for form in FORMS}
    survivors = [context.Process(target=survive, args=(r, tables, found), daemon=True) for r in range(3)]
    for process in survivors:
        process.start()
    report["survivors"] = dict(found.get() for _ in survivors)
    for process in survivors:
        process.join()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
