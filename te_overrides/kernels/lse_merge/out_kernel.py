"""Outputs corrected by weights that `lse_kernel.weights_kernel` has left: bound by memory alone.

Weights and outputs are two launches. In one, every program first waits for a chain of some seventy dependent float64
operations and holds its registers meanwhile: 0.74 to 0.87 of copy bandwidth on an H200 in every form tried, against
0.93 to 0.97 in two, although the weights then travel through memory (8 bytes a row of the output).
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.lse_merge.lse_kernel import ADD, SCALE
from te_overrides.kernels.rounding.kernel import to_bfloat16

_SCALE, _ADD = tl.constexpr(SCALE), tl.constexpr(ADD)


@triton.jit
def _weighted(value, weight):
    """[R, C] value times [R] weight in the weight's dtype; 0 in rows without keys (weight -1), whatever they hold."""
    product = value.to(weight.dtype) * weight[:, None]
    return tl.where((weight < 0.0)[:, None], 0.0, product)


@triton.jit
def correct_kernel(
    out_ptr, step_out_ptr, weight_ptr,
    out_stride_0, out_stride_1, out_stride_2, out_stride_3,
    step_out_stride_0, step_out_stride_1, step_out_stride_2, step_out_stride_3,
    weight_stride_0, weight_stride_1, weight_stride_2,
    rows, size_1, size_2, columns,
    FORM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Outputs [size_0, size_1, size_2, columns]; a row number counts their first three dimensions."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)  # [C]
    row_inside = row < rows
    # A row number has at most 31 bits: divide it as such.
    narrow = row.to(tl.int32)
    i0 = (narrow // (size_1 * size_2)).to(tl.int64)
    i1 = ((narrow // size_2) % size_1).to(tl.int64)
    i2 = (narrow % size_2).to(tl.int64)
    # Without a comparison per column whole vectors are loaded at once.
    inside = row_inside[:, None] if WHOLE else row_inside[:, None] & (column < columns)[None, :]
    out_row = out_ptr + (i0 * out_stride_0 + i1 * out_stride_1 + i2 * out_stride_2)[:, None]
    out_at = out_row + (column * out_stride_3)[None, :]
    step_row = (
        step_out_ptr + (i0 * step_out_stride_0 + i1 * step_out_stride_1 + i2 * step_out_stride_2)[:, None]
    )
    step_out = tl.load(step_row + (column * step_out_stride_3)[None, :], mask=inside, other=0.0)
    weight_at = weight_ptr + i0 * weight_stride_0 + i1 * weight_stride_1 + i2 * weight_stride_2
    if FORM == _SCALE:
        result = _weighted(step_out, tl.load(weight_at, mask=row_inside, other=0.0))
    else:
        out = tl.load(out_at, mask=inside, other=0.0)
        result = _weighted(step_out, tl.load(weight_at, mask=row_inside, other=0.0))
        if FORM == _ADD:
            result = out.to(result.dtype) + result
        else:
            result = _weighted(out, tl.load(weight_at + rows, mask=row_inside, other=0.0)) + result
    if out_ptr.dtype.element_ty != tl.float64:
        # One rounding to float32 on the way from float64 to a 16-bit dtype, as the reference.
        result = result.to(tl.float32)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_at, to_bfloat16(result), mask=inside)
    else:
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=inside)
