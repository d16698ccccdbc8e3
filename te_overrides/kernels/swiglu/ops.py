"""``silu(gate) * up`` with autograd: the reference on a CPU, a kernel of the same bits on a GPU."""

from __future__ import annotations

from types import ModuleType

import torch

from te_overrides.kernels.devices import on_gpu, require_one_dtype
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.swiglu import reference


def _implementation(**operands: torch.Tensor) -> ModuleType:
    if not on_gpu("SwiGLU", **operands):
        return reference
    from te_overrides.kernels.swiglu import kernel

    return kernel


@eager_only
def swiglu_packed(packed: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a packed ``[gate; up]`` last dimension: [..., 2 I] -> [..., I]."""
    out: torch.Tensor = _implementation(packed=packed).swiglu_packed(packed)
    return out


@eager_only
def swiglu_packed_backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The packed gradient [..., 2 I] of `swiglu_packed` for `grad` [..., I].

    Raises:
        DeviceError, DtypeError: operands of several devices or dtypes.
        ValueError: a gradient that is not half as wide as `packed`.
    """
    require_one_dtype("SwiGLU", packed=packed, grad=grad)
    if packed.shape != (*grad.shape[:-1], 2 * grad.shape[-1]):
        raise ValueError(
            f"SwiGLU: packed is {tuple(packed.shape)}, grad {tuple(grad.shape)}; a gradient is half as wide"
        )
    out: torch.Tensor = _implementation(packed=packed, grad=grad).swiglu_packed_backward(grad, packed)
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
