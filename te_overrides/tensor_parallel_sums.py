"""What the replacements of TransformerEngine's sums over tensor-parallel ranks share.

TransformerEngine hands in its own group, or None for the default process group (where our collectives read None as a
group of one), adds in place, and takes a handle to wait for where it asked for one.
"""

from __future__ import annotations

from typing import Any

from te_overrides.kernels.collectives.reference import Sum, start_all_reduce


def group_or_default(tp_group: Any) -> Any:
    """The group that TransformerEngine means; None (a group of one) where nothing is distributed."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    return dist.group.WORLD if tp_group is None else tp_group


def handle_of(sum_: Sum, async_op: bool) -> Sum | None:
    """The sum to wait for, or None once it is finished."""
    if async_op:
        return sum_
    sum_.wait()
    return None


def all_reduce_in_place(inp: Any, tp_group: Any, async_op: bool) -> tuple[Any, Sum | None]:
    """`inp`, which holds the balanced tree over ranks (after the handle's `wait`, where one is returned).

    Raises:
        CollectiveError: a number of ranks that is no power of two.
        DisagreementError: ranks that call with other shapes or dtypes.
    """
    group = group_or_default(tp_group)
    if group is None or group.size() == 1:
        return inp, None
    return inp, handle_of(start_all_reduce(inp, group, out=inp.detach()), async_op)
