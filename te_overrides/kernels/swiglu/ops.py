"""``silu(gate) * up`` with autograd: the reference on a CPU, a kernel of the same bits on a GPU."""

from __future__ import annotations

from types import ModuleType

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.swiglu import reference


def _implementation(x: torch.Tensor) -> ModuleType:
    if not x.is_cuda:
        return reference
    from te_overrides.kernels.swiglu import kernel

    return kernel


@eager_only
def swiglu_packed(packed: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a packed ``[gate; up]`` last dimension: [..., 2 I] -> [..., I]."""
    out: torch.Tensor = _implementation(packed).swiglu_packed(packed)
    return out


@eager_only
def swiglu_packed_backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The packed gradient [..., 2 I] of `swiglu_packed` for `grad` [..., I]."""
    out: torch.Tensor = _implementation(packed).swiglu_packed_backward(grad, packed)
    return out


class SwiGLU(torch.autograd.Function):
    """`swiglu_packed` with its gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed)
        return swiglu_packed(packed)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        (packed,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return swiglu_packed_backward(grads[0], packed)
