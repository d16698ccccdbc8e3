"""Processes of this machine that act as the ranks of one world after another.

They are forked on a CPU, where Megatron is then imported once, and spawned on a GPU, which a forked process cannot use.
A world meets over a file; bytes go over NCCL where every rank has a GPU of its own, else over gloo. A rank that raises
or takes too long ends the pool's processes, the error names the rank and carries its traceback, and the next world
finds new ones.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_plugins.verify.interrupts import become_deaf, deaf_children

GRACE_SECONDS = 2.0
"""After a rank has failed, the others have this long to speak."""
LOST_A_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""In the traceback of a rank whose only fault is that another one failed."""


class WorldError(RuntimeError):
    """A rank raised, died or hung; the message says which and how."""


def prepare_environment(folder: Path) -> None:
    """What ranks expect of their environment: armed, gloo on the loopback, a ledger outside the working directory."""
    os.environ["DETERMINISTIC_ROCM"] = "invariant"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("DETERMINISTIC_ROCM_LEDGER", str(folder / "determinism-ledger.json"))
    if sys.platform == "linux":
        # Without it gloo resolves the host name, which fails on machines that are not in their own DNS.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def backend_of(device: str, world: int) -> str:
    """What moves the bytes of a world of so many ranks."""
    import torch

    return "nccl" if device == "cuda" and torch.cuda.device_count() >= world > 1 else "gloo"


def _serve(pipe: Connection, device: str) -> None:
    become_deaf()
    import patches.auto  # noqa: F401  before megatron is imported

    while (message := pipe.recv()) is not None:
        function, arguments, rank, world, store = message
        try:
            pipe.send(("done", _one(function, arguments, rank, world, store, device)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            # Who asked shows the traceback; multiprocessing's copy of it would run into the tables.
            sys.stderr = open(os.devnull, "w")
            raise


def _one(function: str, arguments: Any, rank: int, world: int, store: str, device: str) -> Any:
    """Join the world and call the function that is named ``module:function``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed: Any = dist
    distributed.init_process_group(
        backend_of(device, world), store=distributed.FileStore(store, world), rank=rank, world_size=world
    )
    try:
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(rank, world, *arguments)
        # Nobody leaves while a peer may still read from it.
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


class Pool(AbstractContextManager["Pool"]):
    """So many processes.

    Args:
        ranks: the largest world.
        device: "cpu" or "cuda".
        folder: for the files over which worlds meet.
        seconds: a world that takes longer is ended.
        start: "fork" or "spawn"; None takes what the device needs.
    """

    def __init__(
        self, ranks: int, device: str, folder: Path, seconds: float = 420.0, start: str | None = None
    ) -> None:
        self.ranks, self.device, self.folder, self.seconds = ranks, device, folder, seconds
        self.start = start or ("fork" if device == "cpu" else "spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._worlds = 0

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self.start)
        for _ in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.device), daemon=True)
            with deaf_children():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def run(self, world: int, function: str, *arguments: Any) -> list[Any]:
        """What ``function(rank, world, *arguments)`` returned on every rank, in rank order.

        Args:
            world: number of ranks, at most the pool's.
            function: ``"module:name"``.
            arguments: picklable.

        Raises:
            WorldError: a rank raised, died or hung.
        """
        if not 1 <= world <= self.ranks:
            raise WorldError(f"a world of {world} ranks in a pool of {self.ranks}")
        if not self._processes:
            self._start()
        store = str(self.folder / f"store-{id(self)}-{self._worlds}")
        self._worlds += 1
        for rank in range(world):
            self._pipes[rank].send((function, arguments, rank, world, store))
        try:
            return self._collect(world, function)
        except WorldError:
            # The others wait in a collective for the one that is gone.
            self.close()
            raise

    def _collect(self, world: int, function: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self.seconds
        while waiting := [rank for rank in range(world) if rank not in answers and rank not in failures]:
            pipes = {self._pipes[rank]: rank for rank in waiting}
            ready: list[Any] = wait(list(pipes), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready and not failures:
                raise WorldError(
                    f"{function}: ranks {waiting} of {world} are not done after {self.seconds:.0f} s"
                )
            if not ready:
                break
            for pipe in ready:
                kind, value = self._answer(pipes[pipe])
                (answers if kind == "done" else failures)[pipes[pipe]] = value
            if failures:
                # Others wait for the one that is gone, or have already noticed; it may still be about to speak.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            # Who only lost a peer speaks last.
            order = sorted(
                failures, key=lambda rank: (any(text in failures[rank] for text in LOST_A_PEER), rank)
            )
            raise WorldError(
                "\n".join(f"{function}: rank {rank} of {world}{failures[rank]}" for rank in order)
            )
        return [answers[rank] for rank in range(world)]

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=5)
            return "failed", f" died without a word, exit status {self._processes[rank].exitcode}"
        return kind, f":\n{value}" if kind == "failed" else value
