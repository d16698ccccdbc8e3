"""RMSNorm, add and RMSNorm, and their gradients: the references on a CPU, kernels of the same bits on a GPU.

Arguments, results and errors are those of `reference.py` and `add.py`. What the kernels do not cover (rows of more than
32,768 columns, dtypes other than bf16, fp16 and float32) they refuse by name; nothing falls back. Operands on several
devices are a DeviceError, gradients of another dtype than their rows a DtypeError. The weight has a dtype of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from te_overrides.kernels.devices import on_gpu, require_one_dtype
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.rmsnorm import add, reference

Partials = tuple[torch.Tensor, torch.Tensor]


def _kernel() -> Any:
    # Triton is needed on a GPU alone.
    from te_overrides.kernels.rmsnorm import kernel

    return kernel


@eager_only
def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)`` of rows [..., H]."""
    module = _kernel() if on_gpu("RMSNorm", x=x, weight=weight) else reference
    out: tuple[torch.Tensor, torch.Tensor] = module.rmsnorm(x, weight, eps, zero_centered)
    return out


@eager_only
def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, residual_out, rstd)`` of rows [..., H]."""
    module = _kernel() if on_gpu("add+RMSNorm", x=x, residual=residual, weight=weight) else add
    out: tuple[torch.Tensor, ...] = module.add_rmsnorm(x, residual, weight, eps, zero_centered)
    return out[0], out[1], out[2]


@eager_only
def rmsnorm_backward_partials(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
    groups: int | None = None,
) -> Partials:
    """``(dx, partials of the weight's gradient)``; [s, B, H], or [s, B, heads, d] in `groups`."""
    require_one_dtype("RMSNorm backward", x=x, grad=grad)
    module = _kernel() if on_gpu("RMSNorm backward", x=x, grad=grad, weight=weight, rstd=rstd) else reference
    out: Partials = module.rmsnorm_backward_partials(grad, x, weight, rstd, zero_centered, groups)
    return out


@eager_only
def add_rmsnorm_backward_partials(
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
) -> Partials:
    """``(dx, partials of the weight's gradient)`` of [s, B, H]."""
    streams = {"residual_out": residual_out, "grad_out": grad_out, "grad_residual_out": grad_residual_out}
    require_one_dtype("add+RMSNorm backward", **streams)
    module = _kernel() if on_gpu("add+RMSNorm backward", **streams, weight=weight, rstd=rstd) else add
    out: Partials = module.add_rmsnorm_backward_partials(
        grad_out, grad_residual_out, residual_out, weight, rstd, zero_centered
    )
    return out
