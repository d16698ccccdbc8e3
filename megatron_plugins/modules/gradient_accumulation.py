"""Handing a float32 weight gradient to Megatron: into ``main_grad`` or back through autograd."""

from __future__ import annotations

import torch


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
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "gradient_accumulation_fusion is on, but the parameter has no main_grad: wrap the model in Megatron's "
            "DistributedDataParallel before the first backward, or set gradient_accumulation_fusion=False."
        )
    main_grad.add_(grad32.to(main_grad.dtype))
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    # Autograd wants something of the right shape; the data-parallel hook ignores its value.
    return torch.zeros_like(weight, requires_grad=False)
