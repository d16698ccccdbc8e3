"""`reference.py` as Triton kernels over the packed ``[gate; up]`` rows: one pass forward, one backward.

Elementwise, so the launch cannot matter to a bit. Bound by memory and by the float64 exponential, about evenly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.launching import Launch, Plans, signature
from te_overrides.kernels.portable_math.kernel import sigmoid, silu
from te_overrides.kernels.rounding.kernel import to_bfloat16

BLOCK, WARPS = 1024, 4

_plans = Plans()


@triton.jit
def _store(at, value, mask):
    """float32 rounded once to the buffer's dtype."""
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at, to_bfloat16(value), mask=mask)
    else:
        tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(packed_ptr, out_ptr, packed_stride, width, BLOCK: tl.constexpr):
    """packed [T, 2 width], out [T, width] contiguous; a program has BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = packed_ptr + row * packed_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    _store(out_ptr + row * width + column, silu(gate) * up, inside)


@triton.jit
def backward_kernel(grad_ptr, packed_ptr, out_ptr, grad_stride, packed_stride, width, BLOCK: tl.constexpr):
    """grad [T, width], packed [T, 2 width], out [T, 2 width] contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = packed_ptr + row * packed_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    slope = s * (gate * (1.0 - s) + 1.0)
    out_at = out_ptr + row * 2 * width + column
    _store(out_at, (grad * up) * slope, inside)
    _store(out_at + width, grad * silu(gate), inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., C] as [T, C] with contiguous rows, without a copy where the layout has one stride for all rows."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _plan(function: object, rows: int, width: int, strides: tuple[int, ...]) -> Launch:
    grid = (rows, triton.cdiv(width, BLOCK), 1)
    options = {"num_warps": WARPS, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(function, grid, (*strides, width), {"BLOCK": BLOCK}, options)


def swiglu_packed(packed: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [..., 2 I] -> [..., I], dtype kept."""
    flat, width = _rows(packed), packed.shape[-1] // 2
    out = torch.empty(*packed.shape[:-1], width, dtype=packed.dtype, device=packed.device)
    if out.numel():
        key = ("forward", packed.device, signature(flat))
        plan = _plans(key, _plan, forward_kernel, flat.shape[0], width, (flat.stride(0),))
        plan(flat, out)
    return out


def swiglu_packed_backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The gradient [..., 2 I] of `swiglu_packed` for `grad` [..., I]."""
    flat, upper, width = _rows(packed), _rows(grad), grad.shape[-1]
    out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    if out.numel():
        key = ("backward", packed.device, signature(flat), signature(upper))
        strides = (upper.stride(0), flat.stride(0))
        plan = _plans(key, _plan, backward_kernel, flat.shape[0], width, strides)
        plan(upper, flat, out)
    return out
