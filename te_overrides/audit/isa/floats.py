"""Floating point: float16, float32 and float64 in IEEE mode with subnormals kept, round to nearest even.

The kernel's own mode directives are checked by the machine. min and max order -0 below +0 and drop a NaN
against a number, as the CDNA3 instruction set documents V_MIN_F32 and V_MAX_F32 in IEEE mode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from te_overrides.audit.isa.spec import DTYPES, AluSpec, Semantic
from te_overrides.audit.numeric import fma_f32, fma_f64

__all__ = ["ALU", "SEMANTICS"]


def _fma_f16(a, b, c):  # noqa: ANN001, ANN202
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def _extreme(pick: Callable, zero_sign: bool) -> Callable:
    def fn(a, b):  # noqa: ANN001, ANN202
        result = pick(a, b)
        zeros = (a == 0) & (b == 0)
        signs = (np.signbit(a) & np.signbit(b)) if not zero_sign else (np.signbit(a) | np.signbit(b))
        return np.where(zeros, np.where(signs, -0.0, 0.0).astype(result.dtype), result).astype(result.dtype)

    return fn


def _med3(a, b, c):  # noqa: ANN001, ANN202
    low, high = _extreme(np.fmin, True), _extreme(np.fmax, False)
    some_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some_nan, low(low(a, b), c), high(low(a, b), low(high(a, b), c))).astype(a.dtype)


def _clamp(a):  # noqa: ANN001, ANN202
    # DX10_CLAMP: NaN becomes zero.
    return np.where(a > 0, np.minimum(a, a.dtype.type(1)), a.dtype.type(0)).astype(a.dtype)


def _frexp_exponent(a):  # noqa: ANN001, ANN202
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int32)


def _frexp_mantissa(a):  # noqa: ANN001, ANN202
    return np.where(np.isfinite(a), np.frexp(a)[0], a).astype(a.dtype)


def _ldexp(a, e):  # noqa: ANN001, ANN202
    e = e.astype(np.int32)
    if a.dtype == np.float32:
        # Exact in float64 within its range, so the one rounding is the last.
        wide = np.ldexp(a.astype(np.float64), np.clip(e, -600, 600))
        return wide.astype(np.float32)
    return np.ldexp(a, np.clip(e, -4000, 4000)).astype(a.dtype)


def _fract(a):  # noqa: ANN001, ANN202
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.where(np.isfinite(a), np.minimum(a - np.floor(a), below_one), np.nan).astype(a.dtype)


def _class(a, mask):  # noqa: ANN001, ANN202
    tiny = np.finfo(a.dtype).tiny
    negative, normal = np.signbit(a), np.isfinite(a) & (np.abs(a) >= tiny)
    subnormal, zero = (a != 0) & (np.abs(a) < tiny), a == 0
    raw = np.ascontiguousarray(a).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize])
    quiet = (raw >> np.uint64(np.finfo(a.dtype).nmant - 1).astype(raw.dtype)) & raw.dtype.type(1) == 1
    tests = (
        np.isnan(a) & ~quiet, np.isnan(a) & quiet, np.isneginf(a), negative & normal, negative & subnormal,
        negative & zero, ~negative & zero, ~negative & subnormal, ~negative & normal, np.isposinf(a),
    )  # fmt: skip
    result = np.zeros(np.broadcast_shapes(a.shape, mask.shape), np.bool_)
    for bit, test in enumerate(tests):
        result |= test & ((mask >> np.uint32(bit)) & np.uint32(1) == 1)
    return result


def _exp2(a):  # noqa: ANN001, ANN202
    return np.exp2(a.astype(np.float64)).astype(a.dtype)


def _through_double(fn: Callable) -> Callable:
    return lambda a: fn(a.astype(np.float64)).astype(a.dtype)


SEMANTICS: dict[str, Semantic] = {}
ALU: dict[str, AluSpec] = {}

for _kind, _fma in (("f16", _fma_f16), ("f32", fma_f32), ("f64", fma_f64)):
    _unsigned = "u" + _kind[1:]
    _one, _two, _three = (_kind,), (_kind,) * 2, (_kind,) * 3
    _sign = np.array(1 << (int(_kind[1:]) - 1), DTYPES[_unsigned])
    SEMANTICS |= {
        f"add.{_kind}": Semantic(lambda a, b: a + b, _kind, _two),
        f"mul.{_kind}": Semantic(lambda a, b: a * b, _kind, _two),
        f"fma.{_kind}": Semantic(_fma, _kind, _three),
        f"neg.{_kind}": Semantic(lambda a, s=_sign: a ^ s, _unsigned, (_unsigned,)),
        f"abs.{_kind}": Semantic(lambda a, s=_sign: a & ~s, _unsigned, (_unsigned,)),
        f"min.{_kind}": Semantic(_extreme(np.fmin, True), _kind, _two),
        f"max.{_kind}": Semantic(_extreme(np.fmax, False), _kind, _two),
        f"med3.{_kind}": Semantic(_med3, _kind, _three),
        f"clamp.{_kind}": Semantic(_clamp, _kind, _one),
        f"ldexp.{_kind}": Semantic(_ldexp, _kind, (_kind, "i16" if _kind == "f16" else "i32")),
        f"frexp_mant.{_kind}": Semantic(_frexp_mantissa, _kind, _one),
        f"frexp_exp.{_kind}": Semantic(_frexp_exponent, "i32", _one),
        f"floor.{_kind}": Semantic(np.floor, _kind, _one),
        f"ceil.{_kind}": Semantic(np.ceil, _kind, _one),
        f"trunc.{_kind}": Semantic(np.trunc, _kind, _one),
        f"rndne.{_kind}": Semantic(np.rint, _kind, _one),
        f"fract.{_kind}": Semantic(_fract, _kind, _one),
        f"class.{_kind}": Semantic(_class, "b1", (_kind, "u32")),
        f"rcp.{_kind}": Semantic(_through_double(lambda a: 1 / a), _kind, _one, approximate=True),
        f"sqrt.{_kind}": Semantic(_through_double(np.sqrt), _kind, _one, approximate=True),
        f"rsq.{_kind}": Semantic(_through_double(lambda a: 1 / np.sqrt(a)), _kind, _one, approximate=True),
        f"log2.{_kind}": Semantic(_through_double(np.log2), _kind, _one, approximate=True),
        f"exp2.{_kind}": Semantic(_exp2, _kind, _one, approximate=True),
        # V_SIN and V_COS take revolutions.
        f"sin.{_kind}": Semantic(
            _through_double(lambda a: np.sin(2 * np.pi * a)), _kind, _one, approximate=True
        ),
        f"cos.{_kind}": Semantic(
            _through_double(lambda a: np.cos(2 * np.pi * a)), _kind, _one, approximate=True
        ),
    }
    ALU |= {
        f"v_add_{_kind}": AluSpec(f"add.{_kind}", (1, 2)),
        f"v_sub_{_kind}": AluSpec(f"add.{_kind}", (1, 2), negate=(1,)),
        f"v_subrev_{_kind}": AluSpec(f"add.{_kind}", (2, 1), negate=(1,)),
        f"v_mul_{_kind}": AluSpec(f"mul.{_kind}", (1, 2)),
        f"v_fma_{_kind}": AluSpec(f"fma.{_kind}", (1, 2, 3)),
        f"v_fmac_{_kind}": AluSpec(f"fma.{_kind}", (1, 2, 0)),
        f"v_fmaak_{_kind}": AluSpec(f"fma.{_kind}", (1, 2, 3)),
        f"v_fmamk_{_kind}": AluSpec(f"fma.{_kind}", (1, 2, 3)),
        f"v_min_{_kind}": AluSpec(f"min.{_kind}", (1, 2)),
        f"v_max_{_kind}": AluSpec(f"max.{_kind}", (1, 2)),
        f"v_min_num_{_kind}": AluSpec(f"min.{_kind}", (1, 2)),
        f"v_max_num_{_kind}": AluSpec(f"max.{_kind}", (1, 2)),
        f"v_med3_{_kind}": AluSpec(f"med3.{_kind}", (1, 2, 3)),
        f"v_ldexp_{_kind}": AluSpec(f"ldexp.{_kind}", (1, 2)),
        f"v_frexp_mant_{_kind}": AluSpec(f"frexp_mant.{_kind}", (1,)),
        f"v_exp_{_kind}": AluSpec(f"exp2.{_kind}", (1,)),
        f"v_log_{_kind}": AluSpec(f"log2.{_kind}", (1,)),
    }
    for _name in ("floor", "ceil", "trunc", "rndne", "fract", "rcp", "sqrt", "rsq", "sin", "cos"):
        ALU[f"v_{_name}_{_kind}"] = AluSpec(f"{_name}.{_kind}", (1,))
# The same with other exception flags; integer division starts from it.
ALU["v_rcp_iflag_f32"] = AluSpec("rcp.f32", (1,))
ALU["v_frexp_exp_i32_f32"] = AluSpec("frexp_exp.f32", (1,))
ALU["v_frexp_exp_i32_f64"] = AluSpec("frexp_exp.f64", (1,))
