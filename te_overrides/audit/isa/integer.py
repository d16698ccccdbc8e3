"""Integers and bits, vector and scalar. Carries and the scalar condition code are the machine's business."""

from __future__ import annotations

import numpy as np

from te_overrides.audit.isa.spec import AluSpec, Semantic

__all__ = ["ALU", "SEMANTICS"]

_U32 = np.uint32


def _mulhi(a, b):  # noqa: ANN001, ANN202
    wide = np.int64 if a.dtype == np.int32 else np.uint64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


def _mul24(a, b):  # noqa: ANN001, ANN202
    if a.dtype == np.int32:
        a, b = a << np.int32(8) >> np.int32(8), b << np.int32(8) >> np.int32(8)
        return a * b
    return (a & _U32(0xFFFFFF)) * (b & _U32(0xFFFFFF))


def _bfe_u(a, offset, width):  # noqa: ANN001, ANN202
    width = width & _U32(31)
    return (a >> (offset & _U32(31))) & ((_U32(1) << width) - _U32(1))


def _bfe_i(a, offset, width):  # noqa: ANN001, ANN202
    width = width & _U32(31)
    field = _bfe_u(a.view(np.uint32), offset, width)
    sign = np.where(width > 0, _U32(1) << ((width - _U32(1)) & _U32(31)), _U32(0)).astype(np.uint32)
    return ((field ^ sign) - sign).view(np.int32)


def _alignbit(a, b, shift):  # noqa: ANN001, ANN202
    wide = (a.astype(np.uint64) << np.uint64(32)) | b.astype(np.uint64)
    return (wide >> (shift & _U32(31)).astype(np.uint64)).astype(np.uint32)


def _perm(a, b, selector):  # noqa: ANN001, ANN202
    wide = (a.astype(np.uint64) << np.uint64(32)) | b.astype(np.uint64)
    result = np.zeros(np.broadcast_shapes(wide.shape, selector.shape), np.uint32)
    for byte in range(4):
        which = (selector >> _U32(8 * byte)) & _U32(0xFF)
        picked = (wide >> (which & _U32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & _U32(0xFF)
        sign_of = (which - _U32(8)) & _U32(3)
        sign = (wide >> (sign_of.astype(np.uint64) * np.uint64(16) + np.uint64(15))).astype(np.uint32) & _U32(
            1
        )
        picked = np.where(which < 8, picked, np.where(which < 12, sign * _U32(0xFF), 0))
        picked = np.where(which > 12, _U32(0xFF), picked).astype(np.uint32)
        result |= picked << _U32(8 * byte)
    return result


def _leading(a):  # noqa: ANN001, ANN202
    exponent = np.frexp(a.astype(np.float64))[1]
    return np.where(a == 0, -1, 32 - exponent).astype(np.int32).view(np.uint32)


def _trailing(a):  # noqa: ANN001, ANN202
    lowest = a & (~a + a.dtype.type(1))
    exponent = np.frexp(lowest.astype(np.float64))[1] - 1
    return np.where(a == 0, -1, exponent).astype(np.int32).view(np.uint32)


def _leading_signed(a):  # noqa: ANN001, ANN202
    flipped = np.where(a < 0, ~a, a).view(np.uint32)
    return np.where(flipped == 0, _U32(0xFFFFFFFF), _leading(flipped)).astype(np.uint32)


def _reverse(a):  # noqa: ANN001, ANN202
    result = np.zeros_like(a)
    for bit in range(32):
        result |= ((a >> _U32(bit)) & _U32(1)) << _U32(31 - bit)
    return result


def _count(a):  # noqa: ANN001, ANN202
    return np.bitwise_count(a).astype(np.uint32)


def _shift(fn, mask):  # noqa: ANN001, ANN202
    return lambda a, s: fn(a, (s & _U32(mask)).astype(a.dtype))


SEMANTICS: dict[str, Semantic] = {
    "pass.u32": Semantic(lambda a: a, "u32", ("u32",)),
    "pass.u64": Semantic(lambda a: a, "u64", ("u64",)),
}
for _kind in ("u16", "u32", "u64"):
    _signed, _two, _mask = "i" + _kind[1:], (_kind, _kind), int(_kind[1:]) - 1
    SEMANTICS |= {
        f"add.{_kind}": Semantic(lambda a, b: a + b, _kind, _two),
        f"sub.{_kind}": Semantic(lambda a, b: a - b, _kind, _two),
        f"mul.{_kind}": Semantic(lambda a, b: a * b, _kind, _two),
        f"and.{_kind}": Semantic(lambda a, b: a & b, _kind, _two),
        f"or.{_kind}": Semantic(lambda a, b: a | b, _kind, _two),
        f"xor.{_kind}": Semantic(lambda a, b: a ^ b, _kind, _two),
        f"not.{_kind}": Semantic(lambda a: ~a, _kind, (_kind,)),
        f"shl.{_kind}": Semantic(_shift(np.left_shift, _mask), _kind, (_kind, "u32")),
        f"shr.{_kind}": Semantic(_shift(np.right_shift, _mask), _kind, (_kind, "u32")),
        f"shr.{_signed}": Semantic(_shift(np.right_shift, _mask), _signed, (_signed, "u32")),
    }
    for _either in (_kind, _signed):
        SEMANTICS[f"min.{_either}"] = Semantic(np.minimum, _either, (_either, _either))
        SEMANTICS[f"max.{_either}"] = Semantic(np.maximum, _either, (_either, _either))
SEMANTICS |= {
    "mulhi.u32": Semantic(_mulhi, "u32", ("u32", "u32")),
    "mulhi.i32": Semantic(_mulhi, "i32", ("i32", "i32")),
    "mul24.u32": Semantic(_mul24, "u32", ("u32", "u32")),
    "mul24.i32": Semantic(_mul24, "i32", ("i32", "i32")),
    "mulwide.u64": Semantic(
        lambda a, b: a.astype(np.uint64) * b.astype(np.uint64), "u64", ("u32", "u32")
    ),
    "mulwide.i64": Semantic(lambda a, b: a.astype(np.int64) * b.astype(np.int64), "i64", ("i32", "i32")),
    "bfe.u32": Semantic(_bfe_u, "u32", ("u32", "u32", "u32")),
    "bfe.i32": Semantic(_bfe_i, "i32", ("i32", "u32", "u32")),
    "alignbit.u32": Semantic(_alignbit, "u32", ("u32", "u32", "u32")),
    "perm.u32": Semantic(_perm, "u32", ("u32", "u32", "u32")),
    "clz.u32": Semantic(_leading, "u32", ("u32",)),
    "clz.i32": Semantic(_leading_signed, "u32", ("i32",)),
    "ctz.u32": Semantic(_trailing, "u32", ("u32",)),
    "reverse.u32": Semantic(_reverse, "u32", ("u32",)),
    "popcount.u32": Semantic(_count, "u32", ("u32",)),
    "carry.add": Semantic(
        lambda a, b, c: (a.astype(np.uint64) + b.astype(np.uint64) + c) > np.uint64(0xFFFFFFFF),
        "b1", ("u32", "u32", "b1"),
    ),
    "carry.sub": Semantic(
        lambda a, b, c: a.astype(np.int64) - b.astype(np.int64) - c < 0, "b1", ("u32", "u32", "b1")
    ),
    "addc.u32": Semantic(lambda a, b, c: a + b + c.astype(np.uint32), "u32", ("u32", "u32", "b1")),
    "subc.u32": Semantic(lambda a, b, c: a - b - c.astype(np.uint32), "u32", ("u32", "u32", "b1")),
}  # fmt: skip

# Opcodes that are one operation, for vector and scalar registers.
ALU: dict[str, AluSpec] = {
    "v_mov_b32": AluSpec("pass.u32", (1,)),
    "v_mov_b64": AluSpec("pass.u64", (1,)),
    "v_accvgpr_read_b32": AluSpec("pass.u32", (1,)),
    "v_accvgpr_write_b32": AluSpec("pass.u32", (1,)),
    "v_accvgpr_mov_b32": AluSpec("pass.u32", (1,)),
    "v_mul_lo_u32": AluSpec("mul.u32", (1, 2)),
    "v_mul_hi_u32": AluSpec("mulhi.u32", (1, 2)),
    "v_mul_hi_i32": AluSpec("mulhi.i32", (1, 2)),
    "v_mul_u32_u24": AluSpec("mul24.u32", (1, 2)),
    "v_mul_i32_i24": AluSpec("mul24.i32", (1, 2)),
    "v_not_b32": AluSpec("not.u32", (1,)),
    "v_bfe_u32": AluSpec("bfe.u32", (1, 2, 3)),
    "v_bfe_i32": AluSpec("bfe.i32", (1, 2, 3)),
    "v_alignbit_b32": AluSpec("alignbit.u32", (1, 2, 3)),
    "v_perm_b32": AluSpec("perm.u32", (1, 2, 3)),
    "v_ffbh_u32": AluSpec("clz.u32", (1,)),
    "v_ffbh_i32": AluSpec("clz.i32", (1,)),
    "v_ffbl_b32": AluSpec("ctz.u32", (1,)),
    "v_bfrev_b32": AluSpec("reverse.u32", (1,)),
}
for _name in ("add", "sub"):
    for _ending, _kind in (("u32", "u32"), ("i32", "u32"), ("nc_u32", "u32"), ("u16", "u16")):
        ALU[f"v_{_name}_{_ending}"] = AluSpec(f"{_name}.{_kind}", (1, 2))
ALU["v_subrev_u32"] = AluSpec("sub.u32", (2, 1))
ALU["v_subrev_nc_u32"] = AluSpec("sub.u32", (2, 1))
for _name in ("and", "or", "xor"):
    ALU[f"v_{_name}_b32"] = AluSpec(f"{_name}.u32", (1, 2))
for _ending in ("u32", "i32", "u16", "i16"):
    for _name in ("min", "max"):
        ALU[f"v_{_name}_{_ending}"] = AluSpec(f"{_name}.{_ending}", (1, 2))
for _bits, _wide in (("b16", "16"), ("b32", "32"), ("b64", "64")):
    ALU[f"v_lshlrev_{_bits}"] = AluSpec(f"shl.u{_wide}", (2, 1))
    ALU[f"v_lshrrev_{_bits}"] = AluSpec(f"shr.u{_wide}", (2, 1))
for _bits in ("16", "32", "64"):
    ALU[f"v_ashrrev_i{_bits}"] = AluSpec(f"shr.i{_bits}", (2, 1))
