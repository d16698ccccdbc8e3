"""Handing a float32 weight gradient to Megatron: into ``main_grad`` or back through autograd."""

from __future__ import annotations

import torch

from megatron_plugins.collectives.ownership import weight_gradient
from megatron_plugins.parallel_layout import ParallelLayout, canonical_tokens
from te_overrides.kernels.gemm.ops import add_one_lane_, gradient


def deliver_weight_gradient(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, layout: ParallelLayout, fused: bool
) -> torch.Tensor:
    """dW of ``y = x W^T`` of this micro-batch, handed on as `deliver` does.

    Where no other rank owns rows of it, the product goes where it belongs at once: into ``main_grad`` without a
    float32 copy in between, or rounded to the weight's dtype. The bits are those of the long way.

    Args:
        weight: the parameter, [N, K].
        x: [s, B, K], s the positions of this CP rank (already gathered over sequence parallelism).
        grad: [s, B, N].
        fused: see `deliver`.
    """
    if layout.cp_size > 1:
        return deliver(weight, weight_gradient(x, grad, layout), fused)
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
