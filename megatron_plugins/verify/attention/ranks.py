"""Processes of one world that run all rows, one after the other, and report what differs.

On a CPU they are forked, on a GPU spawned, since a forked process cannot use what its parent has. Each rank takes the
GPU of its number modulo the GPUs that there are; NCCL moves bytes where every rank has one of its own, else gloo, which
takes several ranks on one GPU. Which transport it was is in the report.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_plugins.verify.attention.plan import Row, Shape
from megatron_plugins.verify.interrupts import become_deaf, deaf_children

LIMIT = 600.0
"""Seconds of a row after which the world is given up."""


def _rank(
    rank: int,
    world: int,
    store: str,
    rows: Sequence[Row],
    shape: Shape,
    device: str,
    baseline: Any,
    said: Any,
) -> None:
    become_deaf()
    import torch
    import torch.distributed as dist

    from megatron_plugins.verify.attention.rows import KINDS, Baseline, groups_of
    from te_overrides.kernels.bits import count_mismatches

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = f"cuda:{torch.cuda.current_device()}"
    try:
        dist.init_process_group(
            transport(device.partition(":")[0], world), init_method=f"file://{store}", rank=rank, world_size=world,
            timeout=timedelta(seconds=LIMIT),
        )  # fmt: skip
        baseline = baseline or Baseline(shape, device)
        for row in rows:
            group = groups_of(row, rank)
            if rank >= row.ranks:
                continue
            start, found = time.monotonic(), {name: [0, 0] for name in row.columns}
            for name, got, want in KINDS[row.kind](row, baseline, group, rank):
                mismatched, total = count_mismatches(got, want)[:2]
                found[name][0] += mismatched
                found[name][1] += total
            said.put((row.name, rank, found, time.monotonic() - start, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        said.put((None, rank, None, 0.0, traceback.format_exc()))
        raise


def transport(device: str, world: int) -> str:
    """The backend that moves bytes."""
    if device != "cuda":
        return "gloo"
    import torch

    return "nccl" if torch.cuda.device_count() >= world else "gloo"


def run(
    rows: Sequence[Row], shape: Shape, device: str
) -> Generator[tuple[Row, dict[str, list[int]], float], None, None]:
    """Each row when its last rank has reported: mismatched and compared elements by column, and seconds.

    Raises:
        RuntimeError: a rank failed or a row took too long; the message shows what the rank said.
    """
    world = max((row.ranks for row in rows), default=1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory(prefix="verify-attention-") as folder:
        said = context.Queue()
        baseline = _baseline(rows, shape) if device == "cpu" else None
        arguments = (world, str(Path(folder) / "store"), list(rows), shape, device, baseline, said)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
        try:
            with deaf_children():
                for process in ranks:
                    process.start()
            yield from _collected(rows, said, ranks)
            for process in ranks:
                process.join(30)
        finally:
            # All of them before any is waited for, or those that are left speak of lost peers.
            left = [process for process in ranks if process.is_alive()]
            for process in left:
                process.kill()
            for process in left:
                process.join()


def _baseline(rows: Sequence[Row], shape: Shape) -> Any:
    """One rank's results on a CPU, computed once and inherited; on a GPU every process computes its own."""
    import torch

    from megatron_plugins.verify.attention.rows import Baseline

    # A forked process must not inherit a pool of threads.
    torch.set_num_threads(1)
    baseline = Baseline(shape, "cpu")
    if any(row.kind != "packed" for row in rows):
        baseline.dense()
    if any(row.kind == "packed" for row in rows):
        baseline.packed()
    return baseline


def _collected(
    rows: Sequence[Row], said: Any, ranks: Sequence[Any]
) -> Iterator[tuple[Row, dict[str, list[int]], float]]:
    by_name = {row.name: row for row in rows}
    waiting = {row.name: row.ranks for row in rows}
    sums: dict[str, dict[str, list[int]]] = {row.name: {name: [0, 0] for name in row.columns} for row in rows}
    longest = dict.fromkeys(waiting, 0.0)
    while any(waiting.values()):
        name, rank, found, seconds, failure = _next(said, ranks, waiting)
        if failure is not None:
            raise RuntimeError(_all_failures(said, ranks, rank, failure))
        for column, (mismatched, total) in found.items():
            sums[name][column][0] += mismatched
            sums[name][column][1] += total
        longest[name] = max(longest[name], seconds)
        waiting[name] -= 1
        if not waiting[name]:
            yield by_name[name], sums[name], longest[name]


def _next(said: Any, ranks: Sequence[Any], waiting: dict[str, int]) -> Any:
    """The next report.

    Raises:
        RuntimeError: a process ended without a word, or nothing came for `LIMIT` seconds.
    """
    for _ in range(int(LIMIT)):
        died = [(rank, p.exitcode) for rank, p in enumerate(ranks) if p.exitcode]
        try:
            return said.get(timeout=1.0)
        except queue.Empty:
            if died:
                raise RuntimeError(
                    f"rank {died[0][0]} ended with status {died[0][1]} and no report"
                ) from None
    unfinished = next(name for name, left in waiting.items() if left)
    raise RuntimeError(f"row {unfinished!r} did not end within {LIMIT:.0f} s")


def _all_failures(said: Any, ranks: Sequence[Any], rank: int, failure: str) -> str:
    """What every rank said that failed, and who ended without a word: one rank's end makes its peers fail as well."""
    time.sleep(1.0)
    reports = {rank: failure}
    with contextlib.suppress(queue.Empty):
        while True:
            _, other, _, _, words = said.get(timeout=0.1)
            if words is not None:
                reports[other] = words
    lines = [
        f"rank {other} ended with status {process.exitcode} and no report"
        for other, process in enumerate(ranks)
        if process.exitcode and other not in reports
    ]
    return "\n".join(
        [*lines, *(f"rank {other} failed:\n{words}" for other, words in sorted(reports.items()))]
    )
