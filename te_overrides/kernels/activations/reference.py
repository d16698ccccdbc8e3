"""Activations of Megatron's configurations beside SwiGLU, plain and gated, with the contract's stage boundaries.

An activation and its slope are evaluated in float64 from portable operations and rounded once to float32; products with
them are float32 products; the result is rounded to the activation dtype. Plain: ``act(x)``. Gated: ``act(gate) * up``
of a packed ``[gate; up]`` last dimension, the product a rounding of its own.

Elementwise, so nothing but the values enters. GELU by the error function has no entry: erf is not among the portable
functions. Its approximations by tanh and by a sigmoid are exact functions of e^x and are here:
``(1 + tanh u) / 2 = 1 / (1 + e^-2u)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.portable_math.reference import exp_f64, sigmoid_f64

_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715
_QUICK = 1.702


@dataclass(frozen=True)
class Activation:
    """Value and slope of one activation; float64 in and out."""

    value: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]


def _relu(x: torch.Tensor) -> torch.Tensor:
    # By select: NaN stays, and -0 becomes +0 on every device.
    return torch.where(x <= 0.0, 0.0, x)


def _step(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= 0.0, 0.0, 1.0).to(torch.float64)


def _gated_by(scale: float) -> Activation:
    """``x * sigmoid(scale * x)``."""

    def value(x: torch.Tensor) -> torch.Tensor:
        return x / (exp_f64(-(x * scale)) + 1.0)

    def slope(x: torch.Tensor) -> torch.Tensor:
        s = sigmoid_f64(x * scale)
        return s + (x * scale) * (s * (1.0 - s))

    return Activation(value, slope)


def _twice_u(x: torch.Tensor) -> torch.Tensor:
    """2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    return (x * (2.0 * _SQRT_2_OVER_PI)) * (x * x * _CUBIC + 1.0)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return x / (exp_f64(-_twice_u(x)) + 1.0)


def _tanh_gelu_slope(x: torch.Tensor) -> torch.Tensor:
    s = sigmoid_f64(_twice_u(x))
    inner = (x * x * (3.0 * _CUBIC) + 1.0) * (2.0 * _SQRT_2_OVER_PI)
    return s + (x * inner) * (s * (1.0 - s))


ACTIVATIONS: dict[str, Activation] = {
    "silu": _gated_by(1.0),
    "quick_gelu": _gated_by(_QUICK),
    "tanh_gelu": Activation(_tanh_gelu, _tanh_gelu_slope),
    "relu": Activation(_relu, _step),
    "squared_relu": Activation(lambda x: _relu(x) * _relu(x), lambda x: _relu(x) * 2.0),
}


def _rounded(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x.to(torch.float64)).to(torch.float32)


@eager_only
def plain(name: str, x: torch.Tensor) -> torch.Tensor:
    """``act(x)``, shape and dtype of `x`."""
    return _rounded(ACTIVATIONS[name].value, x).to(x.dtype)


@eager_only
def plain_backward(name: str, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``grad * act'(x)`` in the dtype of `x`."""
    return torch.mul(grad.to(torch.float32), _rounded(ACTIVATIONS[name].slope, x)).to(x.dtype)


@eager_only
def gated(name: str, packed: torch.Tensor) -> torch.Tensor:
    """``act(gate) * up``: [..., 2 I] -> [..., I]."""
    gate, up = torch.chunk(packed, 2, dim=-1)
    return torch.mul(_rounded(ACTIVATIONS[name].value, gate), up.to(torch.float32)).to(packed.dtype)


@eager_only
def gated_backward(name: str, grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The packed gradient [..., 2 I]: ``dgate = (grad * up) * act'(gate)``, ``dup = grad * act(gate)``."""
    gate, up = torch.chunk(packed, 2, dim=-1)
    g = grad.to(torch.float32)
    dgate = torch.mul(torch.mul(g, up.to(torch.float32)), _rounded(ACTIVATIONS[name].slope, gate))
    dup = torch.mul(g, _rounded(ACTIVATIONS[name].value, gate))
    return torch.cat([dgate, dup], dim=-1).to(packed.dtype)


class Activate(torch.autograd.Function):
    """`plain` or `gated` with its gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, name: str, is_gated: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.is_gated = name, is_gated  # type: ignore[attr-defined]
        return gated(name, x) if is_gated else plain(name, x)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        name: str = ctx.name  # type: ignore[attr-defined]
        function = gated_backward if ctx.is_gated else plain_backward  # type: ignore[attr-defined]
        return function(name, grads[0], x), None, None
