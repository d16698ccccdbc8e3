"""The loss's exponential and softmax on NVIDIA GPUs: the portable functions' bits at less than half their work.

The portable exponential takes 31 float64 instructions (two of them comparisons) and two conversions for a logit, its
quotient about ten more, and the H200 issues 64 of them a clock and multiprocessor: more time than the memory needs.

`exp_of_difference` fuses: 14 float64 instructions, the portable polynomial. It is not the same float64 number, but the
same float32 one for every float32 argument that a difference from the largest logit can be:
`scripts/fused_exponential_exhaustive.py` compares all of them on a CPU, `scripts/gpu/loss_checks.py` on a GPU.

`softmax` multiplies by a reciprocal instead of dividing. A window around that product contains the portable quotient;
where both of its ends are one float32, that is the portable softmax. A block in which one element is undecided (one in
2^23) is computed again by the portable functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.portable_math import constants as c
from te_overrides.kernels.portable_math.kernel import exp_f64

# e^x is below half of the smallest float32 from here on down: 2^-150.04.
VANISHES = tl.constexpr(-104.0)
_LOG2_E = tl.constexpr(c.LOG2_E)
_MAGIC = tl.constexpr(c.ROUND_MAGIC)
_MINUS_LN2_HIGH = tl.constexpr(-c.LN2_HIGH)
_MINUS_LN2_LOW = tl.constexpr(-c.LN2_LOW)
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8 = (tl.constexpr(value) for value in c.EXP)
# Relative. The two exponentials are within 2^-52 of each other (the exhaustive script), and three operations round by
# 2^-53 each; eight times that.
WINDOW = tl.constexpr(2.0**-48)


@triton.jit
def _fused_exp(x):
    """e^x for -104 <= x <= 0 in float64."""
    shifted = tl.fma(x, _full(x, _LOG2_E), _full(x, _MAGIC))
    k = shifted - _MAGIC
    r = tl.fma(k, _full(x, _MINUS_LN2_LOW), tl.fma(k, _full(x, _MINUS_LN2_HIGH), x))
    value = tl.fma(r, _full(x, _E8), _full(x, _E7))
    value = tl.fma(value, r, _full(x, _E6))
    value = tl.fma(value, r, _full(x, _E5))
    value = tl.fma(value, r, _full(x, _E4))
    value = tl.fma(value, r, _full(x, _E3))
    value = tl.fma(value, r, _full(x, _E2))
    value = tl.fma(value, r, _full(x, _E1))
    value = tl.fma(value, r, _full(x, _E0))
    value = tl.fma(value, r, _full(x, 1.0))
    value = tl.fma(value, r, _full(x, 1.0))
    # The integer in the sum's low bits, moved to the exponent; what lies above it is moved out.
    bits = value.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _full(like, value):
    return tl.full(like.shape, value, tl.float64)


@triton.jit
def exp_of_difference(x):
    """`portable_math.exp` of float32 x <= 0 or NaN."""
    value = _fused_exp(tl.maximum(x, VANISHES).to(tl.float64)).to(tl.float32)
    # Not the smallest subnormal for -104 either: the portable exponential is 0 there.
    value = tl.where(x > VANISHES, value, 0.0)
    return tl.where(x == x, value, x)


@triton.jit
def _portable(x, total):
    return (exp_f64(x.to(tl.float64)) / total.to(tl.float64)).to(tl.float32)


@triton.jit
def softmax(x, total):
    """float32 of the portable quotient e^x / total, x <= 0 or NaN, a block, total >= 1 or NaN a scalar."""
    # A NaN in the row, or an infinity, has made the total NaN: then nothing is decided here.
    inverse = 1.0 / total.to(tl.float64)
    value = _fused_exp(tl.maximum(x, VANISHES).to(tl.float64)) * inverse
    low = (value * (1.0 - WINDOW)).to(tl.float32)
    high = (value * (1.0 + WINDOW)).to(tl.float32)
    vanished = (x <= VANISHES) & (value == value)
    decided = vanished | (low == high)
    soft = tl.where(vanished, 0.0, low)
    if tl.max((~decided).to(tl.int32), 0) != 0:
        soft = _portable(x, total)
    return soft
