"""What a process group was made with: its backend, its timeout, its ranks' key-value store.

torch offers none of the three on the group. Read and run with torch 2.13; where a version keeps them elsewhere, what
cannot do without one says so.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class StoreError(RuntimeError):
    """The ranks of a group cannot speak to each other beside their payload."""


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's own timeout (`timeout=` of `init_process_group` and `new_group`), of several backends the longest.

    It is an option of the backend. None where no backend of the group tells it.
    """
    backends = [group._get_backend(torch.device(kind)) for kind in group._device_types]
    found = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return max((each for each in found if isinstance(each, timedelta) and each > timedelta()), default=None)


def backend_of(group: dist.ProcessGroup) -> str:
    """What `new_group(backend=…)` needs for a group of the same kind, e.g. "gloo" or "cpu:gloo,cuda:nccl"."""
    return dist.get_backend_config(group)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store over which the group's ranks found each other; its keys are the group's own.

    Raises:
        StoreError: this version of torch keeps it elsewhere, or the group has none.
    """
    read = getattr(distributed_c10d, "_get_process_group_store", None)
    if read is None:
        raise StoreError(
            f"torch {torch.__version__} has no distributed_c10d._get_process_group_store: ranks cannot ask each other "
            "beside their payload whether they mean the same, and without that no sum over ranks is made. Use a "
            "version of torch that has it (2.13 does)."
        )
    try:
        store = read(group)
    except KeyError:
        store = None
    if store is None:
        raise StoreError(
            f"{group!r} has no key-value store: it was destroyed, or not made by init_process_group or new_group. "
            "Make it with one of them."
        )
    return store  # type: ignore[no-any-return]
