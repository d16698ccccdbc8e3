"""What the pool of `megatron_plugins.verify` is made to run in tests."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def add(rank: int, world: int, value: int) -> int:
    """The sum of ``value + rank`` over the world."""
    x = torch.tensor([value + rank])
    dist.all_reduce(x)
    return int(x)


def misbehave(rank: int, world: int, how: str) -> None:
    """The last rank raises, dies or hangs; the others wait for it."""
    if rank == world - 1:
        if how == "raise":
            raise ValueError("the last rank raises")
        if how == "die":
            os._exit(7)
        time.sleep(60)
    dist.barrier()
