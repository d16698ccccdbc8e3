"""The loss's exponential and gradient on NVIDIA GPUs: the portable functions' bits at less than half their work.

The portable exponential takes 31 float64 instructions and two conversions for a logit, its quotient about ten more, and
the H200 issues 64 of them a clock and multiprocessor: more time than the memory needs.

`exp_of_difference` fuses: 14 float64 instructions, the portable polynomial. It is not the same float64 number, but the
same float32 one for every float32 argument that a difference from the largest logit can be; `scripts/gpu/loss_checks.py`
compares all of them.

`gradient` multiplies by a reciprocal instead of dividing. `window` bounds the distance of that product from the portable
quotient; where both ends of the window give one float32 softmax, that is the portable one. A block in which one element
is undecided (one in 2^24) is computed again by the portable functions. For 16-bit logits a window of float32 and the
hardware's exponential is asked first: all operations after the softmax are monotonic, so where both ends end in the
same 16 bits, everything between them does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.portable_math import constants as c
from te_overrides.kernels.portable_math.kernel import exp_f64
from te_overrides.kernels.rounding.kernel import rounded

# e^x is below half of the smallest float32 from here on down: 2^-150.04.
VANISHES = tl.constexpr(-104.0)
_LOG2_E = tl.constexpr(c.LOG2_E)
_LOG2_E_F32 = tl.constexpr(1.4426950216293335)
_MAGIC = tl.constexpr(c.ROUND_MAGIC)
_MINUS_LN2_HIGH = tl.constexpr(-c.LN2_HIGH)
_MINUS_LN2_LOW = tl.constexpr(-c.LN2_LOW)
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8 = (tl.constexpr(value) for value in c.EXP)
# Float64: two exponentials of relative error below 2^-49 together, three roundings.
WINDOW = tl.constexpr(2.0**-47)
# Float32: the hardware's exponential (PTX ISA: 2^-22), four roundings here and one of the contract's; PER_POWER times the
# power of two is what rounding that power, and log2(e) in it, does to the exponential.
NARROWEST, PER_POWER = tl.constexpr(2.0**-20), tl.constexpr(2.0**-24)
# Softmax values from here on are far from float32's subnormal numbers.
SMALLEST = tl.constexpr(2.0**-100)


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
def _after(soft, hot, grad):
    """What the contract does with a float32 softmax before it is rounded."""
    return (tl.where(hot, 1.0, 0.0) - soft) * grad


@triton.jit
def _portable(x, total):
    return (exp_f64(x.to(tl.float64)) / total.to(tl.float64)).to(tl.float32)


@triton.jit
def softmax(x, total):
    """float32 of the portable quotient e^x / total, x <= 0 or NaN, a block, total >= 1 or NaN a scalar."""
    # A NaN in the row has made the total NaN, and with it every value undecided.
    inverse = 1.0 / total.to(tl.float64)
    value = _fused_exp(tl.maximum(x, VANISHES).to(tl.float64)) * inverse
    low = (value * (1.0 - WINDOW)).to(tl.float32)
    high = (value * (1.0 + WINDOW)).to(tl.float32)
    vanished = x <= VANISHES
    decided = vanished | (low == high)
    soft = tl.where(vanished, 0.0, low)
    if tl.max((~decided).to(tl.int32), 0) != 0:
        soft = _portable(x, total)
    return soft


@triton.jit
def near_softmax(x, total):
    """The softmax in float32 with the hardware's exponential, and half the width of the window around it."""
    power = x * _LOG2_E_F32
    near = tl.exp2(power) * (1.0 / total.to(tl.float64)).to(tl.float32)
    half = near * (NARROWEST - power * PER_POWER)
    # Padding would be 0 times infinity.
    vanished = x <= VANISHES
    return tl.where(vanished, 0.0, near), tl.where(vanished, 0.0, half)


@triton.jit
def gradient(x, total, hot, grad, DTYPE: tl.constexpr, SHORT: tl.constexpr = True):
    """(one-hot - softmax) grad in DTYPE; x [BLOCK] = logit - largest, total and grad scalars of the row."""
    if SHORT and DTYPE != tl.float32:
        near, half = near_softmax(x, total)
        one = _after(near - half, hot, grad).to(DTYPE)
        other = _after(near + half, hot, grad).to(DTYPE)
        same = one.to(tl.int16, bitcast=True) == other.to(tl.int16, bitcast=True)
        decided = same & ((near >= SMALLEST) | (x <= VANISHES))
        value = one
        if tl.max((~decided).to(tl.int32), 0) != 0:
            value = _after(softmax(x, total), hot, grad).to(DTYPE)
        return value
    else:
        return _after(softmax(x, total), hot, grad).to(DTYPE)
