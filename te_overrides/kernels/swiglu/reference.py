"""``silu(gate) * up`` with the contract's stage boundaries (docs/numbers.md, "Stage boundaries").

silu is the portable one (float64 inside, rounded to float32), the product with `up` is a float32 product, and the
result is rounded to the activation dtype. The gradient rounds the same way, one operation at a time, so that no
compiler can fuse two of them into one rounding.
"""

from __future__ import annotations

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.portable_math.reference import sigmoid, silu


@eager_only
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Forward. `gate`, `up`: same shape and dtype; returns that shape and dtype."""
    return torch.mul(silu(gate.to(torch.float32)), up.to(torch.float32)).to(gate.dtype)


@eager_only
def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dgate, dup)`` in the dtype of `gate`.

    ``dup = grad * silu(gate)``; ``dgate = (grad * up) * (s * (1 + gate * (1 - s)))`` with ``s = sigmoid(gate)``, every
    operation rounded to float32.
    """
    g, x, u = (t.to(torch.float32) for t in (grad, gate, up))
    s = sigmoid(x)
    slope = torch.mul(s, torch.add(torch.mul(x, torch.sub(1.0, s)), 1.0))
    dgate = torch.mul(torch.mul(g, u), slope)
    dup = torch.mul(g, silu(x))
    return dgate.to(gate.dtype), dup.to(gate.dtype)


def swiglu_packed(packed: torch.Tensor) -> torch.Tensor:
    """`swiglu` over a packed ``[gate; up]`` last dimension: [..., 2 I] -> [..., I]."""
    gate, up = torch.chunk(packed, 2, dim=-1)
    return swiglu(gate, up)


def swiglu_packed_backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The packed gradient [..., 2 I] of `swiglu_packed` for `grad` [..., I]."""
    gate, up = torch.chunk(packed, 2, dim=-1)
    return torch.cat(swiglu_backward(grad, gate, up), dim=-1)
