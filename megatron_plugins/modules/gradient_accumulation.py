"""Handing a float32 weight gradient to Megatron: into ``main_grad`` or back through autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_plugins.collectives.ownership import start_weight_gradient
from megatron_plugins.parallel_layout import ParallelLayout, canonical_tokens
from te_overrides.kernels.gemm.ops import add_one_lane_, gradient


def start_weight_gradient_delivery(
    weight: torch.Tensor,
    tokens: Callable[[], torch.Tensor],
    grad: torch.Tensor,
    layout: ParallelLayout,
    fused: bool,
) -> Callable[[], torch.Tensor]:
    """dW of ``y = x W^T`` of this micro-batch: operands start to travel, what is returned computes and delivers it.

    Under context parallelism the exchange of x and grad is under way when this returns; it needs the tokens, which are
    therefore awaited here. Elsewhere they are awaited by what is returned, which hands dW on as `deliver` does.

    Where no other rank owns rows of it, the product goes where it belongs at once: into ``main_grad`` without a
    float32 copy in between, or rounded to the weight's dtype. The bits are those of the long way.

    Args:
        weight: the parameter, [N, K].
        tokens: gives x [s, B, K], s the positions of this CP rank (gathered over sequence parallelism).
        grad: [s, B, N].
        fused: see `deliver`.
    """
    if layout.cp_size > 1:
        moving = start_weight_gradient(tokens(), grad, layout)
        return lambda: deliver(weight, moving(), fused)
    return lambda: _deliver_own(weight, tokens(), grad, fused)


def _deliver_own(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, fused: bool) -> torch.Tensor:
    """dW where this rank has all tokens."""
    a, b = canonical_tokens(grad).t(), canonical_tokens(x).t()
    if not fused:
        return gradient(a, b, weight.dtype)
    main_grad = _main_grad(weight)
    if main_grad.dtype != torch.float32:
        return deliver(weight, gradient(a, b, torch.float32), fused)
    add_one_lane_(main_grad, a, b)
    return _delivered(weight)


def rounded(grad32: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 gradient in its parameter's dtype, with every zero positive.

    A tiny negative value becomes -0 when it is rounded to fp16. Where ranks share the parameter a later sum adds the
    others' +0 and makes it +0; on one rank nobody does. So it is done here, after the rounding, at every degree.
    """
    return torch.add(grad32.to(dtype), 0.0)


def deliver(weight: torch.Tensor, grad32: torch.Tensor, fused: bool) -> torch.Tensor:
    """Accumulate `grad32` as Megatron's own linear layers do.

    Args:
        weight: the parameter.
        grad32: its gradient of this micro-batch, float32.
        fused: ``config.gradient_accumulation_fusion``: add to ``weight.main_grad`` without rounding to the weight's
            dtype first, and tell the data-parallel hook so.

    Returns:
        What autograd is to put into ``weight.grad``.

    Raises:
        RuntimeError: `fused` although the parameter has no ``main_grad``.
    """
    if not fused:
        return rounded(grad32, weight.dtype)
    main_grad = _main_grad(weight)
    main_grad.add_(grad32.to(main_grad.dtype))
    return _delivered(weight)


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "gradient_accumulation_fusion is on, but the parameter has no main_grad: wrap the model in Megatron's "
            "DistributedDataParallel before the first backward, or set gradient_accumulation_fusion=False."
        )
    return main_grad


def _delivered(weight: torch.Tensor) -> torch.Tensor:
    """Tell the data-parallel hook; autograd wants something of the right shape, whose value the hook ignores."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight, requires_grad=False)
