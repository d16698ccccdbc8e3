"""Norm of rows, with a residual added first or without: one pass, every element read and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.portable_math.kernel import rsqrt_f64
from te_overrides.kernels.rounding.kernel import stored
from te_overrides.kernels.tree.kernel import tree_of_rows


@triton.jit
def effective_weight(
    weight_ptr, column, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, ZERO_CENTERED: tl.constexpr
):
    """[N] float32, plus one if centered at zero; WHOLE: no column is outside."""
    if WHOLE:
        weight = tl.load(weight_ptr + column).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight = weight + 1.0
    return weight


@triton.jit
def load_rows(ptr, at, inside, WHOLE: tl.constexpr):
    """[R, N] as stored; zeros outside."""
    if WHOLE:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, at, value, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptr + at, value)
    else:
        tl.store(ptr + at, value, mask=inside)


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr, rstd_ptr,
    rows, x_stride, residual_stride, epsilon_bits,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    NATIVE: tl.constexpr = False,
):  # fmt: skip
    """x, residual [rows, COLUMNS] with row strides -> out, residual_out [rows, COLUMNS] contiguous, rstd [rows].

    `epsilon_bits`: the bits of a float64, since a float argument arrives as a float32. Without ADD the residual
    pointers are not looked at.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WHOLE: tl.constexpr = ROWS == 1 and COLUMNS == 2**LEVELS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    column = tl.arange(0, 2**LEVELS)  # [N]
    row_inside = row < rows
    inside = (
        row_inside[:, None] if COLUMNS == 2**LEVELS else row_inside[:, None] & (column < COLUMNS)[None, :]
    )
    at = (row * COLUMNS)[:, None] + column[None, :]
    value = load_rows(x_ptr, (row * x_stride)[:, None] + column[None, :], inside, WHOLE).to(tl.float32)
    if ADD:
        residual = load_rows(residual_ptr, (row * residual_stride)[:, None] + column[None, :], inside, WHOLE)
        summed = stored(value + residual.to(tl.float32), DTYPE, NATIVE)
        store_rows(residual_out_ptr, at, summed, inside, WHOLE)
        value = summed.to(tl.float32)
    squares = value * value
    if COLUMNS < 2**LEVELS:
        # -0 is the one number that changes no sum.
        squares = tl.where((column < COLUMNS)[None, :], squares, -0.0)
    total = tree_of_rows(squares, LEVELS).to(tl.float64)
    epsilon = epsilon_bits.to(tl.int64).to(tl.float64, bitcast=True)
    rstd = rsqrt_f64(total / COLUMNS + epsilon).to(tl.float32)
    tl.store(rstd_ptr + row, rstd, mask=row_inside)
    normed = stored(value * rstd[:, None], DTYPE, NATIVE).to(tl.float32)
    weight = effective_weight(weight_ptr, column, COLUMNS, COLUMNS == 2**LEVELS, ZERO_CENTERED)
    store_rows(out_ptr, at, stored(normed * weight[None, :], DTYPE, NATIVE), inside, WHOLE)
