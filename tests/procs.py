"""Runs one function on several gloo ranks of this machine and says in words what went wrong on which rank.

Ranks are forked from a fork server that has imported torch and done nothing else. Forking from the test process
would copy its threads, its armed hooks and its imported upstream modules; spawning would import torch eight times
on two cores. A rank therefore starts within milliseconds, in a process where nothing but torch is imported.

The rendezvous store lives in the test process on a port that the system picks, so two test processes never race
for one. A rank that raises ends the world: the others, who would wait for it in a collective, are given a moment
to report and then killed. A world that hangs is killed after `timeout` with the Python stack of every rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# After a first rank has failed, the others have this long to fail by themselves and add their own report.
GRACE_SECONDS = 2.0


class RankFailure(AssertionError):
    """A rank raised, died or hung. The message shows each failed rank's traceback, the first to fail first."""


class _Report:
    """Leaves the traceback of whatever ends the rank in a file for the test process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is None or value is None:
            return
        # Frames before the test's own function are this file's.
        inner = tb.tb_next if tb is not None else None
        text = "".join(traceback.format_exception(kind, value, inner))
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(self.path)
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for process groups that a dead peer keeps waiting.
        os._exit(1)


def _die_with_the_test_process() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _rank_main(
    rank: int, world_size: int, port: int, folder: Path, environment: dict[str, str], timeout: float
) -> None:
    threading.Thread(target=_die_with_the_test_process, daemon=True).start()
    # The fork server keeps the environment of the moment it was started; a test may have changed its own since.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if sys.platform == "linux":
        # Without it gloo resolves the host name, which fails on machines that are not in their own DNS.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(folder / f"stack-{rank}", "w") as stack, _Report(folder / f"error-{rank}"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        torch.set_num_threads(1)
        fn, args = torch.load(folder / "call", weights_only=False)
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        result = fn(rank, world_size, *args)
        torch.save(result, folder / f"result-{rank}")
        # Nobody leaves while a peer may still be reading from it.
        dist.barrier()
        dist.destroy_process_group()


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` gloo ranks.

    Args:
        world_size: number of processes. The default group is gloo over all of them, one torch thread each.
        fn: a module-level function (it is sent by name; a lambda or nested function is refused by pickle).
        args: picklable; tensors are copied to each rank.
        timeout: seconds after which the world is killed; also the process group's own.
        env: set in the ranks on top of this process's environment.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailure: a rank raised, died or ran past the timeout; says which.
        ValueError: world_size below 1.
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size {world_size}, need 1 or more")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "procs"])
    # With the port chosen by the system and the store held here, no rank can lose a race for it.
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        torch.save((fn, args), folder / "call")
        ranks = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, store.port, folder, environment, timeout),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            hung = _wait_for_all(ranks, timeout, folder)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        _raise_on_failure(fn, ranks, hung, timeout, folder)
        return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(world_size)]


def _wait_for_all(ranks: list[Any], timeout: float, folder: Path) -> list[int]:
    """Wait until every rank has ended, one has failed (plus grace), or time is up; returns the ranks that hang."""
    deadline = time.monotonic() + timeout
    failed = False
    while alive := [process for process in ranks if process.is_alive()]:
        if not failed and any(process.exitcode not in (None, 0) for process in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([process.sentinel for process in alive], left)
    if failed or not alive:
        return []
    for process in alive:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return [index for index, process in enumerate(ranks) if process.is_alive()]


def _raise_on_failure(
    fn: Callable[..., Any], ranks: list[Any], hung: list[int], timeout: float, folder: Path
) -> None:
    __tracebackhide__ = True
    world = f"{fn.__module__}.{fn.__qualname__} on {len(ranks)} ranks"
    if hung:
        stacks = "\n".join(f"rank {rank}: {(folder / f'stack-{rank}').read_text()}" for rank in hung)
        raise RankFailure(
            f"{world}: ranks {hung} still running after {timeout:g} s and killed; where they were:\n{stacks}"
        )
    reports = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    silent = [
        f"rank {rank} died without a word, exit status {process.exitcode}"
        for rank, process in enumerate(ranks)
        if process.exitcode not in (0, 1, -signal.SIGKILL)
    ]
    if not reports and not silent and all(process.exitcode == 0 for process in ranks):
        return
    told = [f"rank {path.name.removeprefix('error-')}:\n{path.read_text()}" for path in reports]
    statuses = {f"rank {rank}": process.exitcode for rank, process in enumerate(ranks)}
    raise RankFailure(f"{world} failed (exit statuses {statuses})\n" + "\n".join(silent + told))
