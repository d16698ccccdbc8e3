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
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any


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
        deadline = time.monotonic() + self.seconds
        while len(answers) < world:
            missing: Sequence[int] = [rank for rank in range(world) if rank not in answers]
            ready = wait(
                [self._pipes[rank] for rank in missing], timeout=max(deadline - time.monotonic(), 0.0)
            )
            if not ready:
                raise WorldError(
                    f"{function}: ranks {missing} of {world} are not done after {self.seconds:.0f} s"
                )
            for rank in missing:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=5)
                    status = self._processes[rank].exitcode
                    raise WorldError(
                        f"{function}: rank {rank} of {world} died without a word, exit status {status}"
                    ) from None
                if kind == "failed":
                    raise WorldError(f"{function}: rank {rank} of {world}:\n{value}")
                answers[rank] = value
        return [answers[rank] for rank in range(world)]
