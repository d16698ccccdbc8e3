"""Which GPU a device is, and whether the kernels written for Hopper run there."""

from __future__ import annotations

import functools

import torch
import triton


@functools.cache
def architecture(device: torch.device) -> str:
    """The launch tables' name of a GPU: gfx942, gfx950, sm_90, …"""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """A Hopper GPU, and a Triton whose Gluon those kernels are written in (3.6 and later)."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 6) and architecture(device) == "sm_90"
