"""Conversions. Float to integer saturates and sends NaN to zero, as the V_CVT instructions do."""

from __future__ import annotations

import numpy as np

from te_overrides.audit.isa.spec import DTYPES, AluSpec, Semantic

__all__ = ["ALU", "SEMANTICS"]


def _to_integer(target: str):  # noqa: ANN202
    dtype = DTYPES[target]
    info = np.iinfo(dtype)

    def fn(a):  # noqa: ANN001, ANN202
        wide = np.trunc(a.astype(np.float64))
        inside = np.clip(np.where(np.isnan(wide), 0.0, wide), float(info.min), float(info.max))
        return inside.astype(dtype)

    return fn


def _to_bf16(a):  # noqa: ANN001, ANN202
    raw = np.ascontiguousarray(a).view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), (raw >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def _cast(target: str):  # noqa: ANN202
    return lambda a: a.astype(DTYPES[target])


def _byte(index: int):  # noqa: ANN202
    return lambda a: ((a >> np.uint32(8 * index)) & np.uint32(0xFF)).astype(np.float32)


_CASTS = "f32 f16, f16 f32, f64 f32, f32 f64, f32 i32, f32 u32, f64 i32, f64 u32, f16 i16, f16 u16"
SEMANTICS: dict[str, Semantic] = {"cvt.bf16.f32": Semantic(_to_bf16, "bf16", ("f32",))}
ALU: dict[str, AluSpec] = {}
for _pair in _CASTS.split(", "):
    _target, _source = _pair.split()
    SEMANTICS[f"cvt.{_target}.{_source}"] = Semantic(_cast(_target), _target, (_source,))
    ALU[f"v_cvt_{_target}_{_source}"] = AluSpec(f"cvt.{_target}.{_source}", (1,))
for _target in ("i32", "u32", "i16", "u16"):
    for _source in ("f32", "f64") if _target.endswith("32") else ("f16",):
        SEMANTICS[f"cvt.{_target}.{_source}"] = Semantic(_to_integer(_target), _target, (_source,))
        ALU[f"v_cvt_{_target}_{_source}"] = AluSpec(f"cvt.{_target}.{_source}", (1,))
for _index in range(4):
    SEMANTICS[f"cvt.f32.ubyte{_index}"] = Semantic(_byte(_index), "f32", ("u32",))
    ALU[f"v_cvt_f32_ubyte{_index}"] = AluSpec(f"cvt.f32.ubyte{_index}", (1,))
