"""Upstream's backward of a column-parallel layer, with the sum over tensor-parallel ranks taken out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from te_overrides.kernels.collectives.reference import all_reduce


def added_over_ranks(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`backward` of an autograd function that would all-reduce its first result where ``ctx.allreduce_dgrad`` says so.

    Args:
        backward: takes (ctx, grad_output); reads ``ctx.allreduce_dgrad`` and ``ctx.tp_group``; its first result is the
            input's gradient.

    Raises (when called):
        CollectiveError: a number of ranks that is no power of two.
        DisagreementError: ranks that call with other shapes or dtypes.
    """

    @functools.wraps(backward)
    def of_all_ranks(ctx: Any, grad_output: Any) -> tuple[Any, ...]:
        if not ctx.allreduce_dgrad:
            return backward(ctx, grad_output)
        ctx.allreduce_dgrad = False
        try:
            part, *others = backward(ctx, grad_output)
        finally:
            # The graph may be kept and walked again.
            ctx.allreduce_dgrad = True
        return all_reduce(part, ctx.tp_group, out=part), *others

    return of_all_ranks
