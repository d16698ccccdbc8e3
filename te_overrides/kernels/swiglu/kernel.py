"""`reference.py` as Triton kernels over the packed ``[gate; up]`` rows: one pass forward, one backward.

Elementwise, so the launch cannot matter to a bit. Bound by memory and by the float64 exponential, about evenly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.launching import Launch, Plans, device_of, options, row_stride, signature, with_rows
from te_overrides.kernels.portable_math.kernel import sigmoid, silu
from te_overrides.kernels.rounding.kernel import rounded

BLOCK, THREADS = 1024, 128

_plans = Plans()


@triton.jit
def forward_kernel(packed_ptr, out_ptr, packed_stride, width, BLOCK: tl.constexpr):
    """packed [T, 2 width], out [T, width] contiguous; a program has BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = packed_ptr + row * packed_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    value = rounded(silu(gate) * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, value, mask=inside)


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
    tl.store(out_at, rounded((grad * up) * slope, out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at + width, rounded(grad * silu(gate), out_ptr.dtype.element_ty), mask=inside)


def _plan(function: object, width: int, *read: torch.Tensor) -> Launch:
    grid = (read[0].numel() // read[0].shape[-1], triton.cdiv(width, BLOCK), 1)
    strides = tuple(row_stride(x) for x in read)
    return Launch(function, grid, (*strides, width), {"BLOCK": BLOCK}, options(THREADS))


def swiglu_packed(packed: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [..., 2 I] -> [..., I], dtype kept."""
    packed, width = with_rows(packed), packed.shape[-1] // 2
    out = torch.empty(*packed.shape[:-1], width, dtype=packed.dtype, device=packed.device)
    if out.numel():
        plan = _plans(("forward", packed.device, signature(packed)), _plan, forward_kernel, width, packed)
        with device_of(packed):
            plan(packed, out)
    return out


def swiglu_packed_backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The gradient [..., 2 I] of `swiglu_packed` for `grad` [..., I]."""
    grad, packed = with_rows(grad), with_rows(packed)
    out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    if out.numel():
        key = ("backward", packed.device, signature(grad), signature(packed))
        plan = _plans(key, _plan, backward_kernel, grad.shape[-1], grad, packed)
        with device_of(packed):
            plan(grad, packed, out)
    return out
