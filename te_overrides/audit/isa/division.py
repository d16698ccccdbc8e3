"""The helpers of correctly rounded division: V_DIV_SCALE, V_DIV_FMAS, V_DIV_FIXUP in float32 and float64.

After the pseudo code of the CDNA3 instruction set architecture manual: div_scale moves numerator or denominator
by a power of two where the steps between would overflow or become subnormal and says so in VCC, div_fmas undoes
it with the last fused multiply-add, div_fixup puts in signs, zeros, infinities and NaN.
"""

from __future__ import annotations

import numpy as np

from te_overrides.audit.isa.spec import DTYPES, Semantic
from te_overrides.audit.numeric import fma_f32, fma_f64

__all__ = ["SEMANTICS"]

# kind: exponent bias, exponent distance near overflow, exponent of tiny numerators, scale exponent
_LIMITS = {"f32": (127, 96, 23, 64), "f64": (1023, 768, 53, 128)}


def _exponent(a, kind: str):  # noqa: ANN001, ANN202
    """The biased exponent field."""
    bias = _LIMITS[kind][0]
    tiny = np.abs(a) < np.finfo(a.dtype).tiny
    field = np.frexp(a)[1] + bias - 1
    return np.where(tiny, 0, np.where(np.isfinite(a), field, 2 * bias + 1))


def _scale_parts(kind: str, s0, s1, s2):  # noqa: ANN001, ANN202
    _, near_overflow, tiny_numerator, scale = _LIMITS[kind]
    dtype, tiny = DTYPES[kind], np.finfo(DTYPES[kind]).tiny
    up, down = dtype(2.0**scale), dtype(2.0**-scale)

    def subnormal(a):  # noqa: ANN001, ANN202
        return (a != 0) & (np.abs(a) < tiny)

    with np.errstate(all="ignore"):
        inverse_small = subnormal((1 / s1).astype(dtype))
        # A quotient that rounds to zero counts as subnormal.
        quotient = np.abs((s2 / s1).astype(dtype))
        quotient_small = (quotient < tiny) & (s2 != 0)
        cases = [
            ((s2 == 0) | (s1 == 0), np.full_like(s0, np.nan), False),
            (
                _exponent(s2, kind) - _exponent(s1, kind) >= near_overflow,
                np.where(s0 == s1, s0 * up, s0),
                True,
            ),
            (subnormal(s1), s0 * up, False),
            (inverse_small & quotient_small, np.where(s0 == s1, s0 * down, s0), True),
            (inverse_small, s0 * down, False),
            (quotient_small, np.where(s0 == s2, s0 * up, s0), True),
            (_exponent(s2, kind) <= tiny_numerator, s0 * up, False),
        ]
    conditions = [case[0] for case in cases]
    value = np.select(conditions, [case[1] for case in cases], s0).astype(dtype)
    flag = np.select(conditions, [np.full(s0.shape, case[2]) for case in cases], False).astype(np.bool_)
    return value, flag


def _fmas(kind: str, a, b, c, flag):  # noqa: ANN001, ANN202
    bias, _, _, scale = _LIMITS[kind]
    fma = fma_f32 if kind == "f32" else fma_f64
    # One rounding, after the scaling: without it subnormal quotients could not be correctly rounded.
    factor = np.where(flag, np.where(_exponent(c, kind) > bias, 2.0**scale, 2.0**-scale), 1.0)
    return fma(a, b, c, factor)


def _fixup(kind: str, quotient, denominator, numerator):  # noqa: ANN001, ANN202
    dtype, bias = DTYPES[kind], _LIMITS[kind][0]
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), dtype(-1), dtype(1))
    with np.errstate(all="ignore"):
        distance = _exponent(numerator, kind) - _exponent(denominator, kind)
        conditions = [
            np.isnan(numerator), np.isnan(denominator),
            (numerator == 0) & (denominator == 0), np.isinf(numerator) & np.isinf(denominator),
            (denominator == 0) | np.isinf(numerator), np.isinf(denominator) | (numerator == 0),
            distance < -(bias + (23 if kind == "f32" else 52)), np.isnan(quotient),
        ]  # fmt: skip
        nan, inf, zero = dtype(np.nan), dtype(np.inf), dtype(0)
        choices = [numerator, denominator, nan, nan, sign * inf, sign * zero, sign * zero, sign * inf]
        return np.select(conditions, choices, np.copysign(np.abs(quotient), sign)).astype(dtype)


SEMANTICS: dict[str, Semantic] = {}
for _kind in ("f32", "f64"):
    _three = (_kind,) * 3
    SEMANTICS |= {
        f"div_scale.{_kind}": Semantic(lambda *s, k=_kind: _scale_parts(k, *s)[0], _kind, _three),
        f"div_scaled.{_kind}": Semantic(lambda *s, k=_kind: _scale_parts(k, *s)[1], "b1", _three),
        f"div_fmas.{_kind}": Semantic(lambda *s, k=_kind: _fmas(k, *s), _kind, (*_three, "b1")),
        f"div_fixup.{_kind}": Semantic(lambda *s, k=_kind: _fixup(k, *s), _kind, _three),
    }
