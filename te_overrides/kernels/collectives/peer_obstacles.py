"""Whether the ranks of a group can read each other's memory; in words, and the same words on every rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


class PeerError(RuntimeError):
    """A peer-to-peer collective that cannot be, or that a rank did not come to."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs.

    Attributes:
        host: name and boot of the machine: containers of one machine share it, machines of one name do not.
        device: identity of its GPU on that machine, whatever CUDA_VISIBLE_DEVICES calls it; "" without a GPU.
        visible: value of CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, or "".
        devices: how many GPUs this process sees.
    """

    host: str
    device: str
    visible: str
    devices: int


def describe_rank() -> RankPlace:
    """This process's place."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    visible = os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    if not torch.cuda.is_available():
        return RankPlace(host, "", visible, 0)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = str(getattr(properties, "uuid", "")) or f"{properties.name} at bus {properties.pci_bus_id}"
    return RankPlace(host, device, visible, torch.cuda.device_count())


def obstacle(places: Sequence[RankPlace], worlds: Sequence[int]) -> str | None:
    """Why these ranks, in rank order, cannot share memory, or None."""
    if len(places) not in worlds:
        return (
            f"{len(places)} ranks were asked to share memory; the kernels are built for {tuple(worlds)}. "
            "DETERMINISTIC_ROCM_COLLECTIVES=nodes+peers leaves other groups to the process group's own transport."
        )
    for rank, place in enumerate(places):
        if not place.device:
            return f"rank {rank} has no GPU. Use the process group's own transport."
        if place.host != places[0].host:
            return (
                f"rank {rank} runs on another machine than rank 0. Peer-to-peer memory ends at the node: set "
                "DETERMINISTIC_ROCM_COLLECTIVES=nodes+peers, which shares memory within each node alone, or unset it."
            )
        first = next(other for other, its in enumerate(places) if its.device == place.device)
        if first != rank:
            return (
                f"ranks {first} and {rank} use one GPU ({place.device}). Kernels that wait for each other must run at "
                "the same time: give each rank a GPU of its own."
            )
        if place.devices < len(places):
            return (
                f"rank {rank} sees {place.devices} of the group's {len(places)} GPUs (CUDA_VISIBLE_DEVICES="
                f"{place.visible or 'unset'}). Symmetric memory opens the others' memory through devices that this "
                "process sees: let every rank see all GPUs of the node and choose its own with torch.cuda.set_device."
            )
    return None
