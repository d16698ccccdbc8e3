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


class SwiGLU(torch.autograd.Function):
    """Over the packed ``[gate; up]`` last dimension of Megatron's fc1 output: [..., 2 I] -> [..., I]."""

    @staticmethod
    @eager_only
    def forward(ctx: torch.autograd.function.FunctionCtx, packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed)
        out: torch.Tensor = _implementation(packed).swiglu_packed(packed)
        return out

    @staticmethod
    @eager_only
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        (packed,) = ctx.saved_tensors  # type: ignore[attr-defined]
        out: torch.Tensor = _implementation(packed).swiglu_packed_backward(grads[0], packed)
        return out
