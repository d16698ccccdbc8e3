"""Which of an operation's two implementations a tensor gets, the reference on a CPU or the kernel on a GPU, and where a
group's backend takes what it moves."""

from __future__ import annotations

import torch
import torch.distributed as dist


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


def device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor must lie for `group` (None: the default one) to move it: on the GPU in use for NCCL or RCCL.

    A rank that holds nothing, or whose tensors were offloaded, then moves bytes from where its peers do.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get("cuda") == "nccl" or "cpu" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
