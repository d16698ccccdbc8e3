"""The peer-to-peer collectives on one GPU: every rank a stream of this process, with buffers of its own.

    python scripts/gpu/collectives_checks.py [--json FILE] [--no-times] [--worlds 2 4 8]

Bits, against the tree over ranks in plain torch on this GPU: worlds of 2, 4 and 8, all dtypes, additions in float32
too, sizes of 0, 1, odd, unaligned and up to 16 MiB, all orders of (1e8, 1, -1e8, 1), repeats while other work runs on
the device, calls of changing kinds one after the other, a captured graph replayed; a rank that never comes, after which
every result is NaN and all calls that were queued wait no longer than the first. Times: one call of all ranks against
the copies that it consists of, through one GPU's memory; several GPUs are measured by `scripts/bench.py collectives`.
Exit status 1 when an element differs, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemm_checks import median_ms

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.collectives import peer
from te_overrides.kernels.tree.reference import balanced_tree

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, 1, 7, 513, 4097, 100_003, 1 << 20)


class Ranks:
    """All ranks of a world in this process."""

    def __init__(self, world: int, half_bytes: int, patience: float = peer.PATIENCE) -> None:
        self.world = world
        self.spaces = peer.simulated(world, half_bytes, torch.device("cuda"), patience)
        self.streams = [torch.cuda.Stream() for _ in range(world)]

    @property
    def programs(self) -> int:
        """Programs a rank that certainly run at the same time as those of all other ranks."""
        return min(
            peer.MOST_PROGRAMS, torch.cuda.get_device_properties(0).multi_processor_count // self.world
        )

    def each(self, call: Callable[[int, peer.Workspace], None]) -> None:
        """`call` for every rank, each on its own stream; the current stream waits for all of them."""
        here = torch.cuda.current_stream()
        for rank, (space, stream) in enumerate(zip(self.spaces, self.streams, strict=True)):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                call(rank, space)
        for stream in self.streams:
            here.wait_stream(stream)


def tree(terms: list[torch.Tensor], wide: bool) -> torch.Tensor:
    if not wide:
        return balanced_tree(terms)
    return balanced_tree([x.float() for x in terms]).to(terms[0].dtype)


class Checks:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def compare(self, name: str, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        found = [count_mismatches(a, b)[:2] for a, b in zip(got, want, strict=True)]
        self.rows.append(
            {"check": name, "mismatched": sum(f[0] for f in found), "total": sum(f[1] for f in found)}
        )
        if self.rows[-1]["mismatched"]:
            print(self.rows[-1], flush=True)


def bits(world: int, checks: Checks) -> None:
    ranks = Ranks(world, 1 << 25)
    for number, (size, dtype) in enumerate(itertools.product(SIZES, DTYPES)):
        wide = number % 2 == 0
        late = number % 3
        whole = [torch.randn(late + size * world, device="cuda").to(dtype) for _ in range(world)]
        terms = [x[late:] for x in whole]
        own = [x[:size] for x in terms]
        name = f"{world} ranks, {size} {dtype} wide {wide}"
        outs = [torch.full((size,), torch.nan, dtype=dtype, device="cuda") for _ in range(world)]
        ranks.each(
            lambda r, s, o=outs, t=terms, w=wide: peer.reduce_scatter(
                t[r], o[r], s, wide=w, programs=ranks.programs
            )
        )
        checks.compare(
            f"reduce_scatter, {name}", outs, list(tree(terms, wide).chunk(world)) if size else outs
        )
        for shared in (False, True):
            outs = [x.clone() for x in own]
            ranks.each(
                lambda r, s, o=outs, w=wide, h=shared: peer.all_reduce(
                    o[r], o[r], s, wide=w, shared=h, programs=ranks.programs
                )
            )
            checks.compare(f"all_reduce in place, shared {shared}, {name}", outs, [tree(own, wide)] * world)
        outs = [torch.full((world * size,), torch.nan, dtype=dtype, device="cuda") for _ in range(world)]
        ranks.each(lambda r, s, o=outs, x=own: peer.all_gather(x[r], o[r], s, programs=ranks.programs))
        checks.compare(f"all_gather, {name}", outs, [torch.cat(own)] * world)
    if world == 4:
        for order in itertools.permutations((1e8, 1.0, -1e8, 1.0)):
            terms = [torch.tensor([v], device="cuda") for v in order]
            outs = [torch.empty(1, device="cuda") for _ in order]
            ranks.each(lambda r, s, o=outs, t=terms: peer.all_reduce(t[r], o[r], s))
            checks.compare(f"order {order}", outs, [balanced_tree(terms)] * 4)
    repeats(ranks, checks)
    graph(ranks, checks)
    missing(world, checks)


def repeats(ranks: Ranks, checks: Checks) -> None:
    """100 calls while a matrix product of random length runs on another stream."""
    world, busy = ranks.world, torch.cuda.Stream()
    terms = [torch.randn(world * 40_961, device="cuda").bfloat16() for _ in range(world)]
    want = list(balanced_tree(terms).chunk(world))
    a = torch.randn(2048, 2048, device="cuda")
    for repeat in range(100):
        with torch.cuda.stream(busy):
            for _ in range(repeat % 4):
                a @ a
        outs = [torch.full_like(want[0], torch.nan) for _ in range(world)]
        ranks.each(lambda r, s, o=outs: peer.reduce_scatter(terms[r], o[r], s, programs=ranks.programs // 2))
        checks.compare(f"{world} ranks, repeat {repeat}", outs, want)


def graph(ranks: Ranks, checks: Checks) -> None:
    """A captured call, replayed with new operands: halves are taken in turn by a number on the device."""
    world = ranks.world
    terms = [torch.randn(world * 5000, device="cuda") for _ in range(world)]
    outs = [torch.empty(5000, device="cuda") for _ in range(world)]

    def call() -> None:
        ranks.each(lambda r, s: peer.reduce_scatter(terms[r], outs[r], s, programs=ranks.programs // 2))

    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    for replay in range(5):
        for x in terms:
            x.normal_()
        captured.replay()
        checks.compare(f"{world} ranks, graph replay {replay}", outs, list(balanced_tree(terms).chunk(world)))


def missing(world: int, checks: Checks) -> None:
    """All ranks but the last call, and 50 calls more are queued behind the one that misses it."""
    patience, size = 0.5, 40_961
    ranks = Ranks(world, 1 << 20, patience)
    here = torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    outs = [[torch.zeros(size, device="cuda") for _ in range(51)] for _ in range(world - 1)]
    x = torch.randn(size, device="cuda")
    require = peer.Workspace.require_everybody
    # What is queued before anybody has noticed.
    peer.Workspace.require_everybody = lambda self: None  # type: ignore[method-assign]
    begin.record()
    for number in range(51):
        for rank in range(world - 1):
            ranks.streams[rank].wait_stream(here)
            with torch.cuda.stream(ranks.streams[rank]):
                peer.all_reduce(
                    x, outs[rank][number], ranks.spaces[rank], shared=number % 2 == 0, programs=ranks.programs
                )
    for stream in ranks.streams:
        here.wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    peer.Workspace.require_everybody = require  # type: ignore[method-assign]
    numbers = sum(int((~out.isnan()).sum()) for its in outs for out in its)
    unnoticed = sum(not int(space.missing[0]) for space in ranks.spaces[: world - 1])
    waits = begin.elapsed_time(end) / 1e3 / patience
    checks.rows.append(
        {
            "check": f"{world} ranks, one missing: numbers for NaN, ranks that saw nobody missing, waits beyond two",
            "mismatched": numbers + unnoticed + (waits > 2), "total": 51 * (world - 1) * size, "waits": waits,
        }
    )  # fmt: skip
    print(checks.rows[-1], flush=True)


def times(world: int) -> list[dict[str, Any]]:
    """Milliseconds of a reduce-scatter of all ranks, and of copying what they read and write."""
    found = []
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
        ranks = Ranks(world, size)
        terms = [torch.randn(size // 2, device="cuda").bfloat16() for _ in range(world)]
        outs = [torch.empty(size // 2 // world, dtype=torch.bfloat16, device="cuda") for _ in range(world)]
        # Staged and read back once each but for the own share, read once from `x`, written once.
        moved = world * size * (2 * (world - 1) + 1 + 1 / world) / world
        source = torch.empty(int(moved) // 2, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)

        def call(ranks: Ranks = ranks, terms: Any = terms, outs: Any = outs) -> None:
            ranks.each(lambda r, s: peer.reduce_scatter(terms[r], outs[r], s, programs=ranks.programs))

        ms = median_ms({"copy": lambda s=source, t=target: t.copy_(s), "reduce_scatter": call}, 11)
        found.append({"world": world, "bytes a rank": size, "ms": ms})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--worlds", nargs="+", type=int, choices=peer.WORLDS, default=list(peer.WORLDS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    torch.manual_seed(0)
    checks = Checks()
    for world in args.worlds:
        bits(world, checks)
    bad = [row for row in checks.rows if row["mismatched"]]
    total = sum(row["total"] for row in checks.rows)
    print(f"{len(checks.rows)} bit checks, {len(bad)} with mismatches, {total:,} elements", flush=True)
    found = [] if args.no_times or bad else [row for world in args.worlds for row in times(world)]
    if args.json is not None:
        report = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "bits": checks.rows, "times": found,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
