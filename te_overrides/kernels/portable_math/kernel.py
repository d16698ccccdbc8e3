"""The functions of `reference.py` as Triton device functions, operation by operation and bit by bit.

Call them from a kernel that is compiled with `enable_fp_fusion=False`: a contracted multiply-add rounds once where the
contract rounds twice. Float64 `/` and `tl.sqrt` compile to correctly rounded sequences on sm_90, gfx942 and gfx950;
float32 ones do not and are not used.

`exp`, `log1p`, … take and return float32, the `_f64` cores float64. `log1p_of_unit_f64` and `exp_of_nonpositive_f64`
are `log1p_f64` and `exp_f64` without the cases that their arguments cannot reach.
"""

import triton
import triton.language as tl

from te_overrides.kernels.portable_math import constants as c

_ROUND_MAGIC = tl.constexpr(c.ROUND_MAGIC)
_ROUND_MAGIC_BITS = tl.constexpr(c.ROUND_MAGIC_BITS)
_EXP_OVERFLOW = tl.constexpr(c.EXP_OVERFLOW)
_EXP_UNDERFLOW = tl.constexpr(c.EXP_UNDERFLOW)
_EXP2_OVERFLOW = tl.constexpr(c.EXP2_OVERFLOW)
_EXP2_UNDERFLOW = tl.constexpr(c.EXP2_UNDERFLOW)
_LOG2_E = tl.constexpr(c.LOG2_E)
_LN2 = tl.constexpr(c.LN2)
_LN2_HIGH = tl.constexpr(c.LN2_HIGH)
_LN2_LOW = tl.constexpr(c.LN2_LOW)
_SQRT_HALF_BITS = tl.constexpr(c.SQRT_HALF_BITS)
_SIGNIFICAND_MASK = tl.constexpr(c.SIGNIFICAND_MASK)
_SMALLEST_NORMAL = tl.constexpr(c.SMALLEST_NORMAL)
_TWO_TO_54 = tl.constexpr(c.TWO_TO_54)
_TRIG_LIMIT = tl.constexpr(c.TRIG_LIMIT)
_TWO_OVER_PI = tl.constexpr(c.TWO_OVER_PI)
_PI_2_HIGH = tl.constexpr(c.PI_2_HIGH)
_PI_2_MIDDLE = tl.constexpr(c.PI_2_MIDDLE)
_PI_2_LOW = tl.constexpr(c.PI_2_LOW)
_INF = tl.constexpr(float("inf"))
_SQRT_TWO = tl.constexpr(c.SQRT_TWO)
_EXP_NORMAL = tl.constexpr(c.EXP_NORMAL)
# By its bits: Triton compares the globals of a kernel with what they were, and NaN differs from itself.
_NAN_BITS = tl.constexpr(0x7FF8 << 48)
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8 = (tl.constexpr(value) for value in c.EXP)
_L0, _L1, _L2, _L3, _L4, _L5 = (tl.constexpr(value) for value in c.LOG)
_S0, _S1, _S2, _S3, _S4, _S5 = (tl.constexpr(value) for value in c.SIN)
_C0, _C1, _C2, _C3, _C4 = (tl.constexpr(value) for value in c.COS)


@triton.jit
def exp(x):
    """e^x; float32 in and out."""
    return exp_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def exp2(x):
    """2^x; float32 in and out."""
    return exp2_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def log(x):
    """ln x; float32 in and out."""
    return log_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def log1p(x):
    """ln(1 + x); float32 in and out."""
    return log1p_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); float32 in and out."""
    return sigmoid_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def silu(x):
    """x / (1 + e^-x); float32 in and out."""
    return silu_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x); float32 in and out."""
    return rsqrt_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def cos(x):
    """cos x, NaN for |x| > 2^20; float32 in and out."""
    return cos_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def sin(x):
    """sin x, NaN for |x| > 2^20; float32 in and out."""
    return sin_f64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def exp_f64(x):
    x = tl.where(x > _EXP_OVERFLOW, _EXP_OVERFLOW, x)
    x = tl.where(x < _EXP_UNDERFLOW, _EXP_UNDERFLOW, x)
    k, k_bits = _nearest_integer(x * _LOG2_E)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    return _scale(_exp_of_remainder(r), k_bits)


@triton.jit
def exp_of_nonpositive_f64(x):
    """e^x for x <= 0 or NaN. Below -708, where `exp_f64` goes through the subnormals to 0, it stays at e^-708 (3e-308).

    For callers whose result no float32 can tell the difference in.
    """
    x = tl.where(x < _EXP_NORMAL, _EXP_NORMAL, x)
    k, k_bits = _nearest_integer(x * _LOG2_E)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    return _exp_of_remainder(r) * ((k_bits + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def exp2_f64(x):
    x = tl.where(x > _EXP2_OVERFLOW, _EXP2_OVERFLOW, x)
    x = tl.where(x < _EXP2_UNDERFLOW, _EXP2_UNDERFLOW, x)
    k, k_bits = _nearest_integer(x)
    return _scale(_exp_of_remainder((x - k) * _LN2), k_bits)


@triton.jit
def log_f64(x):
    subnormal = x < _SMALLEST_NORMAL
    k_bits, f = _split(tl.where(subnormal, x * _TWO_TO_54, x))
    k = _to_float(tl.where(subnormal, k_bits - 54, k_bits))
    value = _log_of_split(k, f)
    value = tl.where(x < _INF, value, x)
    value = tl.where(x == 0.0, -_INF, value)
    return tl.where(x < 0.0, _nan(x), value)


@triton.jit
def log_of_normal_f64(x):
    """ln x for a positive normal number below infinity, or NaN: `log_f64` without its other cases."""
    k_bits, f = _split(x)
    value = _log_of_split(_to_float(k_bits), f)
    # NaN has no exponent to split; it must not come out as a number.
    return tl.where(x == x, value, x)


@triton.jit
def log1p_f64(x):
    sum_ = x + 1.0
    k_bits, f = _split(sum_)
    k = _to_float(k_bits)
    value = _log_of_split(k, tl.where(k_bits == 0, x, f))
    value = tl.where((x < _INF) & (x != 0.0), value, x)
    value = tl.where(sum_ == 0.0, -_INF, value)
    return tl.where(sum_ < 0.0, _nan(x), value)


@triton.jit
def log1p_of_unit_f64(x):
    """ln(1 + x) for x in [0, 1] or NaN: 1 + x lies in [1, 2], so k is 0 or 1, and NaN comes out of the arithmetic."""
    sum_ = x + 1.0
    upper = sum_ >= _SQRT_TWO
    f = tl.where(upper, sum_ * 0.5 - 1.0, x)
    none = tl.zeros(x.shape, tl.float64)
    return _log_with_offset(tl.where(upper, _LN2_HIGH, none), tl.where(upper, _LN2_LOW, none), f)


@triton.jit
def sigmoid_f64(x):
    return tl.full(x.shape, 1.0, tl.float64) / (exp_f64(-x) + 1.0)


@triton.jit
def silu_f64(x):
    return x / (exp_f64(-x) + 1.0)


@triton.jit
def rsqrt_f64(x):
    return tl.full(x.shape, 1.0, tl.float64) / tl.sqrt(x)


@triton.jit
def cos_f64(x):
    quadrant, sine, cosine = _quadrant_sine_cosine(x)
    value = tl.where((quadrant & 1) == 0, cosine, sine)
    value = tl.where(((quadrant + 1) & 2) == 0, value, -value)
    return tl.where((x >= -_TRIG_LIMIT) & (x <= _TRIG_LIMIT), value, _nan(x))


@triton.jit
def sin_f64(x):
    quadrant, sine, cosine = _quadrant_sine_cosine(x)
    value = tl.where((quadrant & 1) == 0, sine, cosine)
    value = tl.where((quadrant & 2) == 0, value, -value)
    return tl.where((x >= -_TRIG_LIMIT) & (x <= _TRIG_LIMIT), value, _nan(x))


@triton.jit
def _nearest_integer(x):
    shifted = x + _ROUND_MAGIC
    return shifted - _ROUND_MAGIC, shifted.to(tl.int64, bitcast=True) - _ROUND_MAGIC_BITS


@triton.jit
def _to_float(k_bits):
    return (k_bits + _ROUND_MAGIC_BITS).to(tl.float64, bitcast=True) - _ROUND_MAGIC


@triton.jit
def _scale(x, k_bits):
    first = k_bits >> 1
    second = k_bits - first
    high = ((first + 1023) << 52).to(tl.float64, bitcast=True)
    low = ((second + 1023) << 52).to(tl.float64, bitcast=True)
    return x * high * low


@triton.jit
def _exp_of_remainder(r):
    value = r * _E8 + _E7
    value = value * r + _E6
    value = value * r + _E5
    value = value * r + _E4
    value = value * r + _E3
    value = value * r + _E2
    value = value * r + _E1
    value = value * r + _E0
    value = value * r + 1.0
    return value * r + 1.0


@triton.jit
def _split(x):
    offset = x.to(tl.int64, bitcast=True) - _SQRT_HALF_BITS
    significand = ((offset & _SIGNIFICAND_MASK) + _SQRT_HALF_BITS).to(tl.float64, bitcast=True)
    return offset >> 52, significand - 1.0


@triton.jit
def _nan(x):
    return tl.full(x.shape, _NAN_BITS, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _log_of_split(k, f):
    return _log_with_offset(k * _LN2_HIGH, k * _LN2_LOW, f)


@triton.jit
def _log_with_offset(high, low, f):
    s = f / (f + 2.0)
    z = s * s
    value = z * _L5 + _L4
    value = value * z + _L3
    value = value * z + _L2
    value = value * z + _L1
    value = value * z + _L0
    tail = s * (z * value) + low
    return high + ((s + s) + tail)


@triton.jit
def _quadrant_sine_cosine(x):
    k, quadrant = _nearest_integer(x * _TWO_OVER_PI)
    r = ((x - k * _PI_2_HIGH) - k * _PI_2_MIDDLE) - k * _PI_2_LOW
    z = r * r
    sine = z * _S5 + _S4
    sine = sine * z + _S3
    sine = sine * z + _S2
    sine = sine * z + _S1
    sine = sine * z + _S0
    sine = r * (z * sine + 1.0)
    cosine = z * _C4 + _C3
    cosine = cosine * z + _C2
    cosine = cosine * z + _C1
    cosine = cosine * z + _C0
    cosine = z * (z * cosine - 0.5) + 1.0
    return quadrant, sine, cosine
