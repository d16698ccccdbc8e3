"""SwiGLU of 16-bit gates on NVIDIA GPUs: the portable functions' bits at a fraction of their work.

Two evaluations, each checked on the device for every one of the 65,536 gates of a dtype.

`sigmoid_and_silu` gives the portable functions' float32 values. A polynomial of degree 10 with fused multiply-adds, a
reciprocal from the hardware's seed by one cubic step, conversions only on the way in and out: 18 float64 instructions.
The polynomial is good to 2^-52; the nearest that a 16-bit gate brings silu or sigmoid to the middle between two float32
numbers is 2^-42 for gates from 2^-7 on, and for smaller ones sum and quotient round in float64 as the portable ones do.

`swiglu` gives ``silu(gate) * up`` rounded to 16 bits, which hardly ever needs those values: float32 with the hardware's
exponential and reciprocal is within `NARROWEST` + |gate| `PER_GATE` of the product, and where both ends of that window
round to the same 16 bits they are the result. Elsewhere (one bfloat16 in some thousands; zeros, the smallest products,
NaN) the float64 sequence decides. In a matrix product's epilogue float64 costs as much as a pass of its own: the GPU
is at its power limit there.

Only for values that came from bfloat16 or float16. Everything else takes `portable_math`.
"""

from __future__ import annotations

import math
import struct

import triton
import triton.language as tl

from te_overrides.kernels.portable_math.constants import LN2, LOG2_E, ROUND_MAGIC

# e^r for |r| <= ln 2 / 2, relative error 2^-52.07 (Remez), lowest power first.
EXP = tuple(
    float.fromhex(text)
    for text in (
        "0x1p+0",
        "0x1.000000000001dp+0",
        "0x1.ffffffffffe17p-2",
        "0x1.555555554bc08p-3",
        "0x1.55555555933b5p-5",
        "0x1.1111112d49868p-7",
        "0x1.6c16c0c0aec76p-10",
        "0x1.a0197a4e680f2p-13",
        "0x1.a01b6cdf0402dp-16",
        "0x1.72f9857f4a528p-19",
        "0x1.2727ac5e5dcf7p-22",
    )
)
# Beyond: silu is the gate or a zero, sigmoid 1 or 0, and float64 does not overflow before.
LIMIT = 200.0
# Half the width of the window, relative, to which is added |gate| log2(e) times PER_GATE: the exponential and the
# reciprocal (PTX ISA: 2^-22 and 2^-23), four roundings of float32 here and two of the contract's; PER_GATE is what the
# rounding of the exponent's product does to the exponential. The device check finds the largest error of any gate.
NARROWEST, PER_GATE = 2.0**-20, 2.0**-24
# Products from here on are far from where float32 and bfloat16 lose bits.
SMALLEST = 2.0**-100


def _f64(x: float) -> str:
    return "0d" + struct.pack(">d", x).hex().upper()


def _f32(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def _element(i: int, gate: str, silu: str | None, sigmoid: str | None) -> list[str]:
    """PTX for one element, from the float32 register `gate` to `silu`, `sigmoid` or both. Registers end in `i`."""
    lines = [
        f"max.f32 c{i}, {gate}, {_f32(-LIMIT)};",
        f"min.f32 c{i}, c{i}, {_f32(LIMIT)};",
        f"cvt.f64.f32 x{i}, c{i};",
        f"fma.rn.f64 r{i}, x{i}, {_f64(-LOG2_E)}, {_f64(ROUND_MAGIC)};",
        f"mov.b64 {{low{i}, high{i}}}, r{i};",
        f"add.rn.f64 r{i}, r{i}, {_f64(-ROUND_MAGIC)};",
        f"fma.rn.f64 r{i}, r{i}, {_f64(LN2)}, x{i};",
        f"neg.f64 r{i}, r{i};",
        f"mov.f64 p{i}, {_f64(EXP[-1])};",
        *(f"fma.rn.f64 p{i}, p{i}, r{i}, {_f64(c)};" for c in reversed(EXP[:-1])),
        f"mov.b64 {{bits{i}, high{i}}}, p{i};",
        f"shl.b32 low{i}, low{i}, 20;",
        f"add.s32 high{i}, high{i}, low{i};",
        f"mov.b64 p{i}, {{bits{i}, high{i}}};",
        f"add.rn.f64 p{i}, p{i}, {_f64(1.0)};",
        f"rcp.approx.ftz.f64 r{i}, p{i};",
        f"neg.f64 p{i}, p{i};",
        f"fma.rn.f64 p{i}, p{i}, r{i}, {_f64(1.0)};",
        f"fma.rn.f64 p{i}, p{i}, p{i}, p{i};",
        f"fma.rn.f64 r{i}, r{i}, p{i}, r{i};",
    ]
    # Outputs are written last: one of them may be the gate's own register.
    if sigmoid is not None:
        lines += [
            f"cvt.rn.f32.f64 s{i}, r{i};",
            f"setp.nan.f32 q{i}, {gate}, {gate};",
            f"selp.f32 s{i}, {gate}, s{i}, q{i};",
        ]
    if silu is not None:
        # A gate above the limit, or NaN, is its own silu; that of -inf is -inf / inf.
        lines += [
            f"mul.rn.f64 r{i}, x{i}, r{i};",
            f"cvt.rn.f32.f64 c{i}, r{i};",
            f"setp.le.f32 q{i}, {gate}, {_f32(LIMIT)};",
            f"selp.f32 c{i}, c{i}, {gate}, q{i};",
            f"setp.eq.f32 q{i}, {gate}, {_f32(-math.inf)};",
            f"selp.f32 c{i}, {_f32(math.nan)}, c{i}, q{i};",
        ]
    return lines + [f"mov.f32 {to}, {x}{i};" for to, x in ((sigmoid, "s"), (silu, "c")) if to is not None]


def _window(i: int) -> list[str]:
    """PTX for one element: float32 `g` and `u` to the ends `c` and `y` of the window, and the magnitude `t` inside."""
    return [
        f"mul.f32 y{i}, g{i}, {_f32(-LOG2_E)};",
        f"ex2.approx.ftz.f32 t{i}, y{i};",
        f"add.f32 t{i}, t{i}, {_f32(1.0)};",
        f"rcp.approx.ftz.f32 t{i}, t{i};",
        f"mul.f32 t{i}, g{i}, t{i};",
        f"mul.f32 t{i}, t{i}, u{i};",
        f"abs.f32 y{i}, y{i};",
        f"fma.rn.f32 y{i}, y{i}, {_f32(PER_GATE)}, {_f32(NARROWEST)};",
        f"fma.rn.f32 c{i}, t{i}, y{i}, t{i};",
        f"neg.f32 y{i}, y{i};",
        f"fma.rn.f32 y{i}, t{i}, y{i}, t{i};",
        f"abs.f32 t{i}, t{i};",
    ]


def _element_of_16_bits(i: int, pair: str) -> list[str]:
    """PTX for one element: `v`, both ends of the window rounded; `any` where they differ or the product is small."""
    return [
        *_window(i),
        f"cvt.rn.{pair}.f32 v{i}, c{i}, y{i};",
        f"prmt.b32 low{i}, v{i}, v{i}, 0x1032;",
        f"setp.ne.or.b32 any, v{i}, low{i}, any;",
        f"setp.ltu.or.f32 any, t{i}, {_f32(SMALLEST)}, any;",
    ]


def _assembly_of_16_bits(pair: str) -> str:
    """PTX for TOGETHER gates and ups, two to a register: results first, then gates, then ups."""
    half, lines, ends = TOGETHER // 2, ["setp.ne.b32 any, 0, 0;"], []
    for j in range(half):
        for letter, register in (("g", f"${half + j}"), ("u", f"${2 * half + j}")):
            if pair == "bf16x2":
                lines += [
                    f"shl.b32 low0, {register}, 16;",
                    f"mov.b32 {letter}{2 * j}, low0;",
                    f"and.b32 low0, {register}, 0xFFFF0000;",
                    f"mov.b32 {letter}{2 * j + 1}, low0;",
                ]
            else:
                lines += [
                    f"mov.b32 {{f0, f1}}, {register};",
                    f"cvt.f32.f16 {letter}{2 * j}, f0;",
                    f"cvt.f32.f16 {letter}{2 * j + 1}, f1;",
                ]
        ends.append(f"prmt.b32 o{j}, v{2 * j}, v{2 * j + 1}, 0x5410;")
    lines += _by_turns([_element_of_16_bits(i, pair) for i in range(TOGETHER)])
    lines += [*ends, "@!any bra DONE;"]
    lines += _by_turns([_element(i, f"g{i}", f"c{i}", None) for i in range(TOGETHER)])
    lines += [f"mul.f32 c{i}, c{i}, u{i};" for i in range(TOGETHER)]
    lines += [f"cvt.rn.{pair}.f32 o{j}, c{2 * j + 1}, c{2 * j};" for j in range(half)]
    lines += ["DONE:", *(f"mov.b32 ${j}, o{j};" for j in range(half))]
    own = "".join(f".reg .f32 g{i}, u{i}, y{i}, t{i}; .reg .b32 v{i}, o{i};\n" for i in range(TOGETHER))
    return f"{{\n.reg .pred any; .reg .f16 f0, f1;\n{_registers()}{own}" + "\n".join(lines) + "\n}"


def _by_turns(elements: list[list[str]]) -> list[str]:
    return [line for lines in zip(*elements, strict=True) for line in lines]


def _registers() -> str:
    return "".join(
        f".reg .f32 c{i}, s{i}; .reg .f64 x{i}, r{i}, p{i}; .reg .b32 low{i}, high{i}, bits{i}; .reg .pred q{i};\n"
        for i in range(TOGETHER)
    )


def _assembly() -> str:
    """PTX for sigmoid and silu of TOGETHER float32 gates: sigmoids first, then silus, then gates."""
    elements = [_element(i, f"${2 * TOGETHER + i}", f"${TOGETHER + i}", f"${i}") for i in range(TOGETHER)]
    return f"{{\n{_registers()}" + "\n".join(_by_turns(elements)) + "\n}"


# A chain of 21 dependent float64 instructions: elements take turns, or each waits for the one before.
TOGETHER = 4
PACK = tl.constexpr(TOGETHER)
BOTH = tl.constexpr(_assembly())
BOTH_REGISTERS = tl.constexpr(",".join(["=f"] * (2 * TOGETHER) + ["f"] * TOGETHER))
BFLOAT16 = tl.constexpr(_assembly_of_16_bits("bf16x2"))
FLOAT16 = tl.constexpr(_assembly_of_16_bits("f16x2"))
WINDOW = tl.constexpr(
    "{\n.reg .f32 g0, u0, y0, t0, c0;\nmov.f32 g0, $3;\nmov.f32 u0, $4;\n"
    + "\n".join([*_window(0), "mov.f32 $0, c0;", "mov.f32 $1, y0;", "mov.f32 $2, t0;"])
    + "\n}"
)
REGISTERS_OF_16_BITS = tl.constexpr(",".join(["=r"] * (TOGETHER // 2) + ["r"] * TOGETHER))


@triton.jit
def window(gate, up):
    """The ends of the window and the magnitude inside, for the check that the product lies between them."""
    return tl.inline_asm_elementwise(
        WINDOW, "=f,=f,=f,f,f", [gate, up], dtype=(tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def swiglu(gate, up):
    """``silu(gate) * up`` of two bfloat16 or two float16 values, rounded as the portable kernel rounds."""
    if gate.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            BFLOAT16, REGISTERS_OF_16_BITS, [gate, up], dtype=tl.bfloat16, is_pure=True, pack=PACK
        )
    else:
        return tl.inline_asm_elementwise(
            FLOAT16, REGISTERS_OF_16_BITS, [gate, up], dtype=tl.float16, is_pure=True, pack=PACK
        )


@triton.jit
def sigmoid_and_silu(gate):
    """sigmoid and silu of float32 values that came from 16-bit ones, from one exponential."""
    return tl.inline_asm_elementwise(
        BOTH, BOTH_REGISTERS, [gate], dtype=(tl.float32, tl.float32), is_pure=True, pack=PACK
    )
