"""exp, exp2, log, log1p, sigmoid, silu, rsqrt, cos and sin with the same bits on every device (C1).

A library function is allowed to differ in its last bit between vendors, versions and even between two compilations of
one kernel: `libdevice.log1p` on gfx950 answers differently at one and at several elements per thread
(ROCm/TransformerEngine#693). IEEE 754 leaves no such freedom to + - * / and sqrt in float64, to comparisons and to
integer operations, so everything here is made of those alone, one rounding per operation, nothing contracted. The order
of operations below *is* the contract; `kernel.py` repeats it line by line.

Two layers:

* `exp`, `log`, …: float32 in, float32 out, any shape and device. The error is below 0.51 ULP of float32 everywhere,
  subnormals included.
* `exp_f64`, `log_f64`, …: the float64 cores, float64 in and out, relative error below 2^-48 over the whole range of
  float64 (log1p: for arguments that are 0 or at least 2^-1021; cos and sin: absolute error for arguments that are not
  float32 numbers).

Special values are those of IEEE 754: exp(-inf) = 0, log(0) = -inf, log(x < 0) = NaN, log1p(-1) = -inf, rsqrt(-0) =
-inf, NaN stays NaN, log1p and sin keep the sign of zero. silu(-inf) is NaN, as in torch: it is -inf * 0. cos and sin
answer NaN for |x| > 2^20 = 1,048,576 radians, where the three-part pi/2 stops being exact; a rotary position
embedding reaches that at position 2^20.
"""

from collections.abc import Callable

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.portable_math import constants as c


@eager_only
def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x; float32 in and out."""
    return _through_float64(exp_f64, x)


@eager_only
def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x; float32 in and out, exact at integers."""
    return _through_float64(exp2_f64, x)


@eager_only
def log(x: torch.Tensor) -> torch.Tensor:
    """ln x; float32 in and out."""
    return _through_float64(log_f64, x)


@eager_only
def log1p(x: torch.Tensor) -> torch.Tensor:
    """ln(1 + x); float32 in and out."""
    return _through_float64(log1p_f64, x)


@eager_only
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x); float32 in and out."""
    return _through_float64(sigmoid_f64, x)


@eager_only
def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x); float32 in and out."""
    return _through_float64(silu_f64, x)


@eager_only
def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x); float32 in and out."""
    return _through_float64(rsqrt_f64, x)


@eager_only
def cos(x: torch.Tensor) -> torch.Tensor:
    """cos x, x in radians, NaN for |x| > 2^20; float32 in and out."""
    return _through_float64(cos_f64, x)


@eager_only
def sin(x: torch.Tensor) -> torch.Tensor:
    """sin x, x in radians, NaN for |x| > 2^20; float32 in and out."""
    return _through_float64(sin_f64, x)


@eager_only
def exp_f64(x: torch.Tensor) -> torch.Tensor:
    """e^x; float64 in and out. x = k ln 2 + r, |r| <= ln 2 / 2."""
    _require(x, torch.float64)
    x = torch.where(x > c.EXP_OVERFLOW, c.EXP_OVERFLOW, x)
    x = torch.where(x < c.EXP_UNDERFLOW, c.EXP_UNDERFLOW, x)
    k, k_bits = _nearest_integer(x * c.LOG2_E)
    r = (x - k * c.LN2_HIGH) - k * c.LN2_LOW
    return _scale(_exp_of_remainder(r), k_bits)


@eager_only
def exp2_f64(x: torch.Tensor) -> torch.Tensor:
    """2^x; float64 in and out. x = k + r, |r| <= 1/2."""
    _require(x, torch.float64)
    x = torch.where(x > c.EXP2_OVERFLOW, c.EXP2_OVERFLOW, x)
    x = torch.where(x < c.EXP2_UNDERFLOW, c.EXP2_UNDERFLOW, x)
    k, k_bits = _nearest_integer(x)
    return _scale(_exp_of_remainder((x - k) * c.LN2), k_bits)


@eager_only
def log_f64(x: torch.Tensor) -> torch.Tensor:
    """ln x; float64 in and out. x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2))."""
    _require(x, torch.float64)
    subnormal = x < c.SMALLEST_NORMAL
    k_bits, f = _split(torch.where(subnormal, x * c.TWO_TO_54, x))
    k = _to_float(torch.where(subnormal, k_bits - 54, k_bits))
    value = _log_of_split(k, f)
    # False for NaN as well, which then passes through.
    value = torch.where(x < float("inf"), value, x)
    value = torch.where(x == 0.0, float("-inf"), value)
    return torch.where(x < 0.0, float("nan"), value)


@eager_only
def log1p_f64(x: torch.Tensor) -> torch.Tensor:
    """ln(1 + x); float64 in and out. While 1 + x stays within a factor sqrt(2) of 1, x itself is f: nothing is lost."""
    _require(x, torch.float64)
    sum_ = x + 1.0
    k_bits, f = _split(sum_)
    k = _to_float(k_bits)
    value = _log_of_split(k, torch.where(k_bits == 0, x, f))
    # Zeros keep their sign; False for NaN as well.
    value = torch.where((x < float("inf")) & (x != 0.0), value, x)
    value = torch.where(sum_ == 0.0, float("-inf"), value)
    return torch.where(sum_ < 0.0, float("nan"), value)


@eager_only
def sigmoid_f64(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x); float64 in and out."""
    return torch.ones_like(x) / (exp_f64(-x) + 1.0)


@eager_only
def silu_f64(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x); float64 in and out."""
    return x / (exp_f64(-x) + 1.0)


@eager_only
def rsqrt_f64(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x); float64 in and out."""
    _require(x, torch.float64)
    return torch.ones_like(x) / torch.sqrt(x)


@eager_only
def cos_f64(x: torch.Tensor) -> torch.Tensor:
    """cos x; float64 in and out, NaN for |x| > 2^20."""
    quadrant, sine, cosine = _quadrant_sine_cosine(x)
    value = torch.where((quadrant & 1) == 0, cosine, sine)
    return _within_trig_limit(x, torch.where(((quadrant + 1) & 2) == 0, value, -value))


@eager_only
def sin_f64(x: torch.Tensor) -> torch.Tensor:
    """sin x; float64 in and out, NaN for |x| > 2^20."""
    quadrant, sine, cosine = _quadrant_sine_cosine(x)
    value = torch.where((quadrant & 1) == 0, sine, cosine)
    return _within_trig_limit(x, torch.where((quadrant & 2) == 0, value, -value))


def _through_float64(core: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    _require(x, torch.float32)
    return core(x.to(torch.float64)).to(torch.float32)


def _require(x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(
            f"portable math: expected a {dtype} tensor, got {x.dtype}; convert it first, with one rounding"
        )


def _horner(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """coefficients[0] + x (coefficients[1] + x (…)), two roundings a step."""
    *rest, second, last = coefficients
    value = x * last + second
    for coefficient in reversed(rest):
        value = value * x + coefficient
    return value


def _nearest_integer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integer nearest to x (ties to even, |x| < 2^51), as float64 and as int64."""
    shifted = x + c.ROUND_MAGIC
    return shifted - c.ROUND_MAGIC, shifted.view(torch.int64) - c.ROUND_MAGIC_BITS


def _to_float(k_bits: torch.Tensor) -> torch.Tensor:
    """int64 to float64, exact, without a conversion instruction."""
    return (k_bits + c.ROUND_MAGIC_BITS).view(torch.float64) - c.ROUND_MAGIC


def _scale(x: torch.Tensor, k_bits: torch.Tensor) -> torch.Tensor:
    """x 2^k in two exact factors, so that a subnormal result is rounded once and a large one overflows to inf.

    Where x is NaN, k is meaningless; the product is NaN whatever the factors are.
    """
    first = k_bits >> 1
    second = k_bits - first
    return x * ((first + 1023) << 52).view(torch.float64) * ((second + 1023) << 52).view(torch.float64)


def _exp_of_remainder(r: torch.Tensor) -> torch.Tensor:
    return _horner(r, (1.0, 1.0, *c.EXP))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positive normal x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); (k as int64, f). f is exact."""
    offset = x.view(torch.int64) - c.SQRT_HALF_BITS
    significand = ((offset & c.SIGNIFICAND_MASK) + c.SQRT_HALF_BITS).view(torch.float64)
    return offset >> 52, significand - 1.0


def _log_of_split(k: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """k ln 2 + ln(1 + f), with s = f / (2 + f) and ln(1 + f) = ln((1 + s) / (1 - s))."""
    s = f / (f + 2.0)
    z = s * s
    tail = s * (z * _horner(z, c.LOG)) + k * c.LN2_LOW
    return k * c.LN2_HIGH + ((s + s) + tail)


def _quadrant_sine_cosine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x = quadrant pi/2 + r, |r| <= pi/4; (quadrant as int64, sin r, cos r)."""
    _require(x, torch.float64)
    k, quadrant = _nearest_integer(x * c.TWO_OVER_PI)
    r = ((x - k * c.PI_2_HIGH) - k * c.PI_2_MIDDLE) - k * c.PI_2_LOW
    z = r * r
    sine = r * (z * _horner(z, c.SIN) + 1.0)
    cosine = z * (z * _horner(z, c.COS) - 0.5) + 1.0
    return quadrant, sine, cosine


def _within_trig_limit(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    inside = (x >= -c.TRIG_LIMIT) & (x <= c.TRIG_LIMIT)
    return torch.where(inside, value, float("nan"))
