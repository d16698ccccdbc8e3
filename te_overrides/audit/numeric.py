"""Exact arithmetic for the numeric engine: fused multiply-add with one rounding, in numpy.

float32 goes through float64: the product of two float32 is exact there, and rounding the sum *to odd* keeps
the second rounding, to float32, correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
proved algorithms using rounding to odd", IEEE TC 2008). float64 uses the same paper's algorithm on error-free
transforms; where those could overflow or lose bits below the subnormal threshold, single elements are computed
with Python's integers instead.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

__all__ = ["fma_f32", "fma_f64", "round_fraction", "shift_ulps"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_SPLITTER = 134217729.0  # 2**27 + 1, Veltkamp
_SAFE_LOW, _SAFE_HIGH = 2.0**-400, 2.0**400


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _split(a: F64) -> tuple[F64, F64]:
    scaled = _SPLITTER * a
    high = scaled - (scaled - a)
    return high, a - high


def _two_product(a: F64, b: F64) -> tuple[F64, F64]:
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _to_odd(total: F64, error: F64) -> F64:
    """`total + error` (error below half an ULP of total) rounded to odd."""
    bits = np.ascontiguousarray(total).view(np.int64)
    move = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    away = (error > 0) == (total > 0)
    return np.where(move, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


def fma_f32(a: F32, b: F32, c: F32, factor: F64 | float = 1.0) -> F32:
    """`(a * b + c) * factor` with one rounding, float32 arrays of one (broadcastable) shape.

    `factor` is a power of two between 2**-64 and 2**64, as V_DIV_FMAS applies.
    """
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = c.astype(np.float64)
        total, error = _two_sum(product, addend)
        # A zero total keeps the sign IEEE gives it; infinities and NaN make `error` NaN.
        odd = np.where(np.isfinite(total) & (total != 0), _to_odd(total, np.nan_to_num(error)), total)
        return (odd * factor).astype(np.float32)


def round_fraction(value: Fraction) -> float:
    """The float64 nearest to `value`, ties to even; overflow gives an infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _fma_scalar(a: float, b: float, c: float, factor: float = 1.0) -> float:
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        # Exact product and addend do not matter any more; only inf and NaN rules do.
        if np.isfinite(a) and np.isfinite(b):
            return c
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        sign = np.copysign(1.0, a) * np.copysign(1.0, b)
        if a == 0 or b == 0:
            return float(np.float64(sign * 0.0) + np.float64(c))
        return 0.0
    rounded = round_fraction(exact * Fraction(factor))
    return rounded if rounded != 0 else float(np.copysign(0.0, 1 if exact > 0 else -1))


def fma_f64(a: F64, b: F64, c: F64, factor: F64 | float = 1.0) -> F64:
    """`(a * b + c) * factor` with one rounding, float64 arrays of one (broadcastable) shape.

    `factor` is a power of two between 2**-128 and 2**128, as V_DIV_FMAS applies.
    """
    a, b, c, factor = (np.ascontiguousarray(part) for part in np.broadcast_arrays(a, b, c, factor))
    with np.errstate(all="ignore"):
        product_high, product_low = _two_product(a, b)
        inner, inner_low = _two_sum(c, product_low)
        outer, outer_low = _two_sum(product_high, inner)
        tail, tail_error = _two_sum(inner_low, outer_low)
        result = outer + np.where(tail != 0, _to_odd(tail, tail_error), tail)

        def safe(x: F64) -> NDArray[np.bool_]:
            return (np.abs(x) > _SAFE_LOW) & (np.abs(x) < _SAFE_HIGH)

        fine = safe(a) & safe(b) & (safe(c) | (c == 0)) & (result != 0)
        # Scaled within the normal range, the factor changes no bit of the fraction.
        fine &= (np.abs(result) > 2.0**-850) & (np.abs(result) < 2.0**850)
        result = result * factor
    if not fine.all():
        result = result.copy()
        parts = [part.reshape(-1) for part in (a, b, c, factor)]
        flat = result.reshape(-1)
        with np.errstate(all="ignore"):
            for index in np.flatnonzero(~fine.reshape(-1)):
                flat[index] = _fma_scalar(*(float(part[index]) for part in parts))
    return result


def shift_ulps(value: NDArray[np.floating], ulps: int) -> NDArray[np.floating]:
    """`value` moved by `ulps` units in the last place towards infinity (negative: towards minus infinity)."""
    for _ in range(abs(ulps)):
        value = np.nextafter(value, np.asarray(np.inf if ulps > 0 else -np.inf, value.dtype))
    return value
