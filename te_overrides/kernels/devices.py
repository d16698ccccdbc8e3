"""Which of an operation's two implementations a tensor gets, the reference on a CPU or the kernel on a GPU, and where a
group's backend takes what it moves."""

from __future__ import annotations

import torch
import torch.distributed as dist


class DeviceError(ValueError):
    """A tensor lies where neither the reference nor a kernel is proved, or not where its fellow operands lie."""


class DtypeError(ValueError):
    """Operands of one operation whose dtypes differ although its contract has one."""


def on_gpu(operation: str, **operands: torch.Tensor | None) -> bool:
    """True for operands on a GPU (ROCm's are called cuda as well), False on a CPU.

    A kernel is launched with addresses alone: one of another device would be read as if it were one of its own.

    Raises:
        DeviceError: operands on several devices, or on any other device.
    """
    device = require_one_device(operation, **operands)
    if device.type == "cuda":
        return True
    if device.type == "cpu":
        return False
    raise DeviceError(
        f"{operation}: the operands lie on {device}; there is a reference for CPUs and a kernel for GPUs (CUDA, "
        "ROCm), and nothing is proved elsewhere. Move them to one of those."
    )


def require_one_device(operation: str, **operands: torch.Tensor | None) -> torch.device:
    """The device of operands that all lie on one; None is no operand.

    Raises:
        DeviceError: naming two operands and their devices.
    """
    (first, device), *others = ((name, x.device) for name, x in operands.items() if x is not None)
    for name, other in others:
        if other != device:
            raise DeviceError(
                f"{operation}: {first} lies on {device}, {name} on {other}; all operands must lie on one device. Move "
                "one of them."
            )
    return device


def require_one_dtype(operation: str, **operands: torch.Tensor | None) -> None:
    """Verify operands whose contract has one dtype; None is no operand.

    Raises:
        DtypeError: naming two operands and their dtypes.
    """
    (first, dtype), *others = ((name, x.dtype) for name, x in operands.items() if x is not None)
    for name, other in others:
        if other != dtype:
            raise DtypeError(
                f"{operation}: {first} is {dtype}, {name} is {other}; both must have one dtype. Convert one of them "
                "explicitly."
            )


def device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor must lie for `group` (None: the default one) to move it: on the GPU in use for NCCL or RCCL.

    A rank that holds nothing, or whose tensors were offloaded, then moves bytes from where its peers do.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get("cuda") == "nccl" or "cpu" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
