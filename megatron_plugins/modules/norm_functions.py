"""RMSNorm, and residual add with RMSNorm, as autograd functions: rows by the contract, weight gradients by granules.

Add and norm in one pass has the bits of the two one after the other, backwards as well: autograd adds the two gradients
of a residual stream, the norm's and the next residual add's, with one rounding, which is what the fused gradient does
(`te_overrides/kernels/rmsnorm/add.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_plugins.collectives.ownership import check_granules, vector_gradient
from megatron_plugins.modules.gradient_accumulation import deliver
from megatron_plugins.parallel_layout import ParallelLayout
from te_overrides.kernels.rmsnorm import ops


class NormTerms(NamedTuple):
    """What a norm over the hidden size computes with."""

    weight: torch.Tensor
    eps: float
    zero_centered: bool
    layout: ParallelLayout


def _deliver_weight_gradient(
    ctx: Any, weight: torch.Tensor, partials: torch.Tensor, over_heads: bool
) -> torch.Tensor | None:
    layout: ParallelLayout = ctx.layout
    tokens_over_tp = layout.sequence_parallel and not over_heads
    total = vector_gradient(partials, layout, tokens_over_tp=tokens_over_tp, heads_over_tp=over_heads)
    return deliver(weight, total, fused=False)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool, layout: ParallelLayout,
        groups: int | None,
    ) -> torch.Tensor:  # fmt: skip
        y, rstd = ops.rmsnorm(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered, ctx.layout, ctx.groups = zero_centered, layout, groups
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        over_heads = ctx.groups is not None
        if ctx.needs_input_grad[1]:
            check_granules(
                x.shape[0], ctx.layout, tokens_over_tp=ctx.layout.sequence_parallel and not over_heads
            )
        # One pass over the rows leaves both; a frozen weight's partials are dropped.
        dx, partials = ops.rmsnorm_backward_partials(grads[0], x, weight, rstd, ctx.zero_centered, ctx.groups)
        dweight = (
            _deliver_weight_gradient(ctx, weight, partials, over_heads) if ctx.needs_input_grad[1] else None
        )
        return dx, dweight, None, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool,
        layout: ParallelLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        normed, total, rstd = ops.add_rmsnorm(x, residual, weight, eps, zero_centered)
        if not any(ctx.needs_input_grad[:2]):
            # Everything below is frozen: the sum asks for no gradient because the norm's weight does.
            ctx.mark_non_differentiable(total)
        # A gradient that never came is None: adding zeros instead would turn -0 into +0.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, rstd)
        ctx.zero_centered, ctx.layout = zero_centered, layout
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        stream, grad = grads
        if grad is None:
            # The norm was computed elsewhere, from the sum: what is left is the add.
            return stream, stream, None, None, None, None
        total, weight, rstd = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            check_granules(total.shape[0], ctx.layout, tokens_over_tp=ctx.layout.sequence_parallel)
        if stream is None:
            dx, partials = ops.rmsnorm_backward_partials(grad, total, weight, rstd, ctx.zero_centered)
        else:
            dx, partials = ops.add_rmsnorm_backward_partials(
                grad, stream, total, weight, rstd, ctx.zero_centered
            )
        dweight = (
            _deliver_weight_gradient(ctx, weight, partials, over_heads=False)
            if ctx.needs_input_grad[2]
            else None
        )
        return dx, dx, dweight, None, None, None


def rms_norm(x: torch.Tensor, terms: NormTerms, groups: int | None = None) -> torch.Tensor:
    """RMSNorm of [s, B, H], or of [s, B, heads, d] in `groups`: the same shape and dtype."""
    return _RMSNorm.apply(x, *terms, groups)  # type: ignore[no-any-return]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, terms: NormTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x + residual, its norm)`` for [s, B, H] of one dtype, in one pass."""
    return _AddRMSNorm.apply(x, residual, *terms)  # type: ignore[no-any-return]
