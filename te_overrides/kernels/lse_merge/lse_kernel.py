"""Device functions and kernels for the LSE itself: the merge, and the weights that a merge gives to outputs.

Bound by float64 arithmetic and by the instructions around it. What can be done before the conversion to float64 is done
before: comparisons and selections of float32 values are the same in either type, and half the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.portable_math.kernel import exp_f64, exp_of_nonpositive_f64, log1p_of_unit_f64

SCALE, ADD, RESCALE, MERGE = 0, 1, 2, 3
"""Forms of a correction: out = w step; out += w step; out = w' out + w step; the same with the LSE merged."""

_INF = tl.constexpr(float("inf"))
_ADD, _MERGE = tl.constexpr(ADD), tl.constexpr(MERGE)


@triton.jit
def _read_lse(lse):
    """+inf, a row without keys in some kernels, is -inf."""
    return tl.where(lse == _INF, -_INF, lse)


@triton.jit
def _joined(lse, step):
    """Two LSEs as loaded, float32 or float64 -> their join in float64."""
    if lse.dtype == tl.float64 or step.dtype == tl.float64:
        first, second = _read_lse(lse.to(tl.float64)), _read_lse(step.to(tl.float64))
    else:
        first, second = _read_lse(lse), _read_lse(step)
    high = tl.where(first > second, first, second).to(tl.float64)
    low = tl.where(first > second, second, first).to(tl.float64)
    if first.dtype == tl.float64:
        ratio = exp_f64(low - high)
    else:
        # Below 3e-308 the ratio vanishes in the sum with any float32, and in the rounding to float32 if that is 0.
        ratio = exp_of_nonpositive_f64(low - high)
    merged = high + log1p_of_unit_f64(ratio)
    return tl.where((first == -_INF) & (second == -_INF), -_INF, merged)


@triton.jit
def merge_kernel(
    lse_ptr, step_ptr, lse_stride_0, lse_stride_1, lse_stride_2, step_stride_0, step_stride_1, step_stride_2,
    size_1, size_2, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """LSEs [size_0, size_1, size_2] joined in place, `blocks` programs a row of the last dimension."""
    program = tl.program_id(0)
    row = program // blocks
    position = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    first, second = (row // size_1).to(tl.int64), (row % size_1).to(tl.int64)
    inside = position < size_2
    lse_at = lse_ptr + first * lse_stride_0 + second * lse_stride_1 + position * lse_stride_2
    step_at = step_ptr + first * step_stride_0 + second * step_stride_1 + position * step_stride_2
    lse = tl.load(lse_at, mask=inside, other=0.0)
    step = tl.load(step_at, mask=inside, other=0.0)
    tl.store(lse_at, _joined(lse, step).to(lse_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight(lse, total, COMPUTE: tl.constexpr):
    """exp(lse - total) rounded to COMPUTE; -1, which no weight is, marks a row without keys."""
    return tl.where(lse == -_INF, -1.0, exp_f64(lse - total)).to(COMPUTE)


@triton.jit
def weights_kernel(
    old_ptr, new_ptr, step_ptr, weight_ptr,
    old_stride_0, old_stride_1, old_stride_2,
    new_stride_0, new_stride_1, new_stride_2,
    step_stride_0, step_stride_1, step_stride_2,
    rows, size_1, size_2, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LSEs [size_0, size_1, size_2] -> weights of the step's output [rows], then (RESCALE, MERGE) of the old one's."""
    COMPUTE: tl.constexpr = weight_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = row < rows
    # A row number has at most 31 bits: divide it as such.
    narrow = row.to(tl.int32)
    i0 = (narrow // (size_1 * size_2)).to(tl.int64)
    i1 = ((narrow // size_2) % size_1).to(tl.int64)
    i2 = (narrow % size_2).to(tl.int64)
    step_at = step_ptr + i0 * step_stride_0 + i1 * step_stride_1 + i2 * step_stride_2
    step = tl.load(step_at, mask=inside, other=0.0)
    old_at = old_ptr + i0 * old_stride_0 + i1 * old_stride_1 + i2 * old_stride_2
    new_at = new_ptr + i0 * new_stride_0 + i1 * new_stride_1 + i2 * new_stride_2
    if FORM == _MERGE:
        old = tl.load(old_at, mask=inside, other=0.0)
        # Rounded to the accumulator before the weights look at it, as the separate functions do.
        joined = _joined(old, step).to(old_ptr.dtype.element_ty)
        tl.store(old_at, joined, mask=inside)
        total = joined.to(tl.float64)
    else:
        total = _read_lse(tl.load(new_at, mask=inside, other=0.0).to(tl.float64))
    tl.store(weight_ptr + row, _weight(_read_lse(step.to(tl.float64)), total, COMPUTE), mask=inside)
    if FORM > _ADD:
        if FORM != _MERGE:
            old = tl.load(old_at, mask=inside, other=0.0)
        tl.store(weight_ptr + rows + row, _weight(_read_lse(old.to(tl.float64)), total, COMPUTE), mask=inside)
