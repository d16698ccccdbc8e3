"""Which of an operation's two implementations a tensor gets: the reference on a CPU, the kernel on a GPU."""

from __future__ import annotations

import torch


class DeviceError(ValueError):
    """A tensor lies where neither the reference nor a kernel is proved."""


def on_gpu(x: torch.Tensor, operation: str) -> bool:
    """True for a GPU (ROCm's are called cuda as well), False for a CPU.

    Raises:
        DeviceError: any other device.
    """
    if x.is_cuda:
        return True
    if x.device.type == "cpu":
        return False
    raise DeviceError(
        f"{operation}: the tensor lies on {x.device}; there is a reference for CPUs and a kernel for GPUs (CUDA, "
        "ROCm), and nothing is proved elsewhere. Move it to one of those."
    )
