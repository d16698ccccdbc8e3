"""Rotary position embedding with portable cosine and sine.

``torch.cos`` takes a vector or a scalar routine depending on where an element lies in the tensor, so a token's angle
may get other bits when context parallelism moves it. The portable pair depends on the angle alone. Three roundings
to the activation dtype, as the eager expression ``t * cos + rotate_half(t) * sin`` has; a fused compile has one.
"""

from __future__ import annotations

import torch

from te_overrides.kernels.portable_math.reference import cos, sin


def _rotate_half(x: torch.Tensor, interleaved: bool, transpose: bool = False) -> torch.Tensor:
    """``[-x2, x1]``; its transpose (the gradient's) is ``[x2, -x1]``."""
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else torch.chunk(x, 2, dim=-1)
    pair = (second, -first) if transpose else (-second, first)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


class Rope(torch.autograd.Function):
    """``t * cos + rotate_half(t) * sin`` over the first ``freqs.shape[-1]`` channels of `t`.

    `t`: [s, ..., d] activations; `freqs`: [s, 1, 1, r] float32 angles in radians, r <= d. No gradient for `freqs`.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        t: torch.Tensor,
        freqs: torch.Tensor,
        interleaved: bool,
        mscale: float,
    ) -> torch.Tensor:
        angles = freqs.to(torch.float32)
        c = torch.mul(cos(angles), mscale).to(t.dtype)
        s = torch.mul(sin(angles), mscale).to(t.dtype)
        ctx.save_for_backward(c, s)
        ctx.interleaved = interleaved  # type: ignore[attr-defined]
        rotated, rest = t[..., : c.shape[-1]], t[..., c.shape[-1] :]
        out = torch.add(torch.mul(rotated, c), torch.mul(_rotate_half(rotated, interleaved), s))
        return torch.cat((out, rest), dim=-1)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        c, s = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0]
        rotated, rest = grad[..., : c.shape[-1]], grad[..., c.shape[-1] :]
        turned = _rotate_half(torch.mul(rotated, s), ctx.interleaved, transpose=True)  # type: ignore[attr-defined]
        return torch.cat((torch.add(torch.mul(rotated, c), turned), rest), dim=-1), None, None, None
