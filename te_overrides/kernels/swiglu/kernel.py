"""`reference.py` as Triton kernels over the packed ``[gate; up]`` rows: one pass forward, one backward.

Elementwise, so the launch cannot matter to a bit. With NARROW (16-bit gates on an NVIDIA GPU) bound by memory, else by
the float64 exponential.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.launching import Launch, Plans, device_of, options, row_stride, signature, with_rows
from te_overrides.kernels.portable_math.kernel import sigmoid, silu
from te_overrides.kernels.rounding.kernel import rounded
from te_overrides.kernels.swiglu import narrow

BLOCK, THREADS = 1024, 128

_plans = Plans()


@triton.jit
def activated(gate, up, NARROW: tl.constexpr):
    """``silu(gate) * up`` of two values of one dtype, in that dtype; NARROW: see `narrow_gates`."""
    if NARROW:
        return narrow.swiglu(gate, up)
    else:
        return rounded(silu(gate.to(tl.float32)) * up.to(tl.float32), gate.dtype)


@triton.jit
def forward_kernel(packed_ptr, out_ptr, packed_stride, width, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    """packed [T, 2 width], out [T, width] contiguous; a program has BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = packed_ptr + row * packed_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0)
    up = tl.load(gate_at + width, mask=inside, other=0.0)
    value = activated(gate, up, NARROW)
    tl.store(out_ptr + row * width + column, value, mask=inside)


@triton.jit
def backward_kernel(
    grad_ptr, packed_ptr, out_ptr, grad_stride, packed_stride, width, BLOCK: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """grad [T, width], packed [T, 2 width], out [T, 2 width] contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = packed_ptr + row * packed_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    if NARROW:
        s, act = narrow.sigmoid_and_silu(gate)
    else:
        s, act = sigmoid(gate), silu(gate)
    slope = s * (gate * (1.0 - s) + 1.0)
    out_at = out_ptr + row * 2 * width + column
    tl.store(out_at, rounded((grad * up) * slope, out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at + width, rounded(grad * act, out_ptr.dtype.element_ty), mask=inside)


def _plan(function: object, width: int, *read: torch.Tensor) -> Launch:
    grid = (read[0].numel() // read[0].shape[-1], triton.cdiv(width, BLOCK), 1)
    strides = tuple(row_stride(x) for x in read)
    constants = {"BLOCK": BLOCK, "NARROW": narrow_gates(read[0].dtype, torch.version.hip is not None)}
    return Launch(function, grid, (*strides, width), constants, options(THREADS))


def narrow_gates(dtype: torch.dtype, hip: bool) -> bool:
    """Whether values come from `narrow.py`: 16-bit gates, NVIDIA's compiler. The interpreter has no assembler."""
    return dtype.itemsize == 2 and not hip and isinstance(forward_kernel, triton.JITFunction)


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
