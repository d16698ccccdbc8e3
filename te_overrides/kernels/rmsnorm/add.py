"""Residual add and RMSNorm in one (docs/numbers.md, "Rows"): the sum is rounded once, and its rounded value is normed.

``residual_out = round(x + residual)``; ``out = rmsnorm(residual_out)``. The residual stream is what the next layer
reads, so the norm must see what is stored: a kernel that norms the unrounded sum, or truncates the store
(ROCm/aiter#5151), gives other bits than the two operations one after the other.
"""

from __future__ import annotations

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.granules.reference import granule_partials
from te_overrides.kernels.rmsnorm.reference import rmsnorm, rmsnorm_backward


def require_addable(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raises ValueError unless both have one shape and one dtype: broadcasting or promotion would hide a mistake."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"add+RMSNorm: x is {x.dtype} {tuple(x.shape)}, residual is {residual.dtype} {tuple(residual.shape)}; "
            "both must have one shape and one dtype. Convert one of them explicitly."
        )


@eager_only
def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, residual_out, rstd)``.

    Args:
        x, residual: [..., H] of one dtype.
        weight: [H]; `zero_centered` adds one to it.

    Returns:
        out, residual_out [..., H] in the dtype of `x`; rstd [..., 1] float32.

    Raises:
        ValueError: shapes or dtypes of `x` and `residual` differ.
    """
    require_addable(x, residual)
    # float32 inside, one rounding to nearest even: what torch does for 16-bit operands.
    residual_out = torch.add(x, residual)
    out, rstd = rmsnorm(residual_out, weight, eps, zero_centered)
    return out, residual_out, rstd


@eager_only
def add_rmsnorm_backward(
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, terms)``: dx is the gradient of `x` and of `residual` alike; `terms` as in `rmsnorm_backward`.

    The norm's dx is rounded to the activation dtype and the residual stream's gradient is added to it, one rounding
    more: what autograd computes where the two operations are separate.
    """
    require_addable(grad_out, grad_residual_out)
    dx, terms = rmsnorm_backward(grad_out, residual_out, weight, rstd, zero_centered)
    return torch.add(dx, grad_residual_out), terms


@eager_only
def add_rmsnorm_backward_partials(
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, partials)`` for [s, B, H]: `add_rmsnorm_backward`, its terms added up within granules."""
    dx, terms = add_rmsnorm_backward(grad_out, grad_residual_out, residual_out, weight, rstd, zero_centered)
    return dx, granule_partials(terms)
