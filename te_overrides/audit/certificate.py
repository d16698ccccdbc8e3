"""The numerics class of a launch that the audit does not execute: GEMM, attention, reductions.

A certificate is read from what the compiler made: which matrix instruction, which K indices meet in one of them,
in which order their results are chained, how every reduction inside a tile is laid out over registers, lanes and
warps, and which floating-point operations stand around them. Two launches with equal certificates are one class
as far as those things decide it. That is weaker than `audit`, which executes: a certificate does not follow data
from load to store. Anything in the code that it has no rule for is listed as `unresolved`, and a certificate with
such an entry equals no other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from te_overrides.audit.compile import Compiled, Kernel, Launch, compile_kernel
from te_overrides.audit.decode import Program, decode

__all__ = ["Certificate", "Dot", "Reduction", "certify", "classes"]


@dataclass(frozen=True)
class Dot:
    """A `tt.dot`: element types, matrix instruction shape [M, N, K], consecutive K elements that a lane holds.

    `k_set` is where the K indices of the first instruction lie in the tile: those of later ones follow the same
    pattern, in ascending order.
    """

    element: str
    instruction: tuple[int, ...]
    k_width: int
    transposed: bool
    k_set: tuple[int, ...]


@dataclass(frozen=True)
class Reduction:
    """A `tt.reduce`: combining operations, axis, extent along it, and the layout that fixes its order."""

    combine: tuple[str, ...]
    axis: int
    extent: int
    layout: str


@dataclass(frozen=True)
class Certificate:
    """What decides the bits of a launch; `free` is reported beside it and decides none."""

    opcodes: tuple[str, ...]
    dots: tuple[Dot, ...]
    reductions: tuple[Reduction, ...]
    arithmetic: tuple[str, ...]
    unresolved: tuple[str, ...] = ()
    free: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"free": dict(self.free)}


_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)\s*$", re.M)
_DOT = re.compile(
    r"tt\.dot(?:_scaled)? .*: tensor<([\dx]+)x(\w+), (#[^*]+?)> \* tensor<([\dx]+)x(\w+), (#[^>]*>?>?)>"
    r" -> tensor<[\dx]+x\w+, (#\w+)>"
)
_REDUCE = re.compile(
    r"\"tt\.(reduce|scan)\"\(.*?\) <\{axis = (\d+) : i32.*?\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)x\w+, (#[^)]*?)>",
    re.S,
)
_COMBINE = re.compile(
    r"= ((?:arith|math|tt|llvm)\.[\w.]+)|(tt\.elementwise_inline_asm|tt\.extern_elementwise)"
)
_FLOAT = re.compile(
    r"v_(?:pk_)?((?:\w+_)?(?:add|sub|subrev|mul|fma|fmac|fmaak|fmamk|mac|mad|max|min|rcp|rsq|sqrt|exp|log|cvt|ldexp"
    r"|div_\w+|dot\w*)_\w*(?:f16|f32|f64|bf16)\w*)"
)
_CANONICAL = (("subrev", "add"), ("sub_", "add_"), ("fmaak", "fma"), ("fmamk", "fma"), ("fmac", "fma"))


def _arithmetic(program: Program) -> tuple[str, ...]:
    """Names of the floating-point operations used, packed forms and operand orders under one name."""
    found = set()
    for instruction in program.instructions:
        match = _FLOAT.fullmatch(instruction.opcode)
        if match and not instruction.opcode.startswith(("v_mfma", "v_cmp")):
            name = match[1]
            for old, new in _CANONICAL:
                name = name.replace(old, new)
            found.add(name)
    return tuple(sorted(found))


def _attribute(layout: str, name: str) -> tuple[int, ...]:
    match = re.search(rf"\b{name} = \[?([\d, ]+)\]?", layout)
    return tuple(int(part) for part in match[1].split(",")) if match else ()


def _k_set(instruction: Sequence[int], k_width: int) -> tuple[int, ...]:
    """K indices, within the tile, of one MFMA when a lane holds `k_width` consecutive ones.

    An MFMA M×N×K spreads K over 64 / M groups of lanes with K·M/64 indices each; a lane that holds more of them
    keeps the rest for the next instructions.
    """
    groups = 64 // instruction[0]
    each = instruction[2] // groups
    return tuple(group * k_width + index for group in range(groups) for index in range(min(each, k_width)))


def _dots(ttgir: str, layouts: dict[str, str], unresolved: list[str]) -> list[Dot]:
    found = []
    for line in ttgir.splitlines():
        if " tt.dot" not in line:
            continue
        match = _DOT.search(line)
        mma = layouts.get(match[7], "") if match else ""
        if match is None or "amd_mfma" not in mma:
            unresolved.append(f"a dot without a matrix instruction: {line.strip()[:80]}")
            continue
        widths = [_attribute(match[group], "kWidth") for group in (3, 6)]
        shape = _attribute(mma, "instrShape")
        if len(shape) != 3 or widths[0] != widths[1] or len(widths[0]) != 1:
            unresolved.append(f"a dot whose operands are laid out differently: {line.strip()[:80]}")
            continue
        transposed = "isTransposed = true" in mma
        width = widths[0][0]
        found.append(Dot(f"{match[2]} x {match[5]}", shape, width, transposed, _k_set(shape, width)))
    return sorted(set(found), key=str)


def _reductions(ttgir: str, layouts: dict[str, str], unresolved: list[str]) -> list[Reduction]:
    found = []
    matches = list(_REDUCE.finditer(ttgir))
    if len(matches) != len(re.findall(r'"tt\.(?:reduce|scan)"\(', ttgir)):
        unresolved.append("a reduction that could not be read")
    for match in matches:
        shape = [int(part) for part in match[4].split("x")]
        axis = int(match[2])
        layout = match[5]
        for name, text in layouts.items():
            layout = re.sub(rf"{name}\b(?!\w)", text.replace("\\", ""), layout)
        combine = tuple(one or other for one, other in _COMBINE.findall(match[3]))
        kept = _along(layout, axis, unresolved)
        found.append(Reduction((match[1], *combine), axis, shape[axis], kept))
    return sorted(set(found), key=str)


def _along(layout: str, axis: int, unresolved: list[str]) -> str:
    """The part of a layout that decides the order along `axis`."""
    if "amd_mfma" in layout and "dot_op" not in layout:
        warps, shape = _attribute(layout, "warpsPerCTA"), _attribute(layout, "instrShape")
        transposed = "isTransposed = true" in layout
        return f"mfma warps {warps[axis]} instruction {shape[:2]} transposed {transposed}"
    if layout.startswith("#ttg.blocked"):
        names = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
        return "blocked " + " ".join(f"{name} {_attribute(layout, name)[axis]}" for name in names)
    unresolved.append(f"a reduction over {layout[:60]}")
    return layout


def certificate_of(compiled: Compiled) -> Certificate:
    """Read the certificate of one compiled launch."""
    program = decode(compiled.assembly)
    layouts = dict(_LAYOUT.findall(compiled.ttgir))
    unresolved: list[str] = []
    dots = _dots(compiled.ttgir, layouts, unresolved)
    reductions = _reductions(compiled.ttgir, layouts, unresolved)
    mfmas = [one for one in program.instructions if one.opcode.startswith(("v_mfma", "v_smfmac", "v_wmma"))]
    for one in mfmas:
        addend = one.operands[3]
        if addend.kind not in ("v", "a", "imm") or (addend.kind == "imm" and addend.value != 0):
            unresolved.append(f"a matrix instruction that starts from a constant: {one.text}")
    if dots and not mfmas:
        unresolved.append("a dot without a matrix instruction in the code")
    for one in program.instructions:
        if "atomic" in one.opcode:
            unresolved.append(f"an atomic: {one.opcode}")
    spills = re.findall(r"\.(\wgpr_spill_count|private_segment_fixed_size):\s+(\d+)", compiled.assembly)
    free = (
        *((name, int(value)) for name, value in spills),
        ("shared", compiled.shared),
        ("mfma", len(mfmas)),
    )
    return Certificate(
        tuple(sorted({one.opcode for one in mfmas})),
        tuple(dots),
        tuple(reductions),
        _arithmetic(program),
        tuple(sorted(set(unresolved))),
        free,
    )


def certify(
    kernel: Kernel, arch: str, launches: Sequence[Launch], divisible: tuple[str, ...] = ()
) -> dict[Launch, Certificate]:
    """Certificates of every launch; `divisible` names the scalars that are multiples of 16."""
    return {launch: certificate_of(compile_kernel(kernel, arch, launch, divisible)) for launch in launches}


def classes(certificates: dict[Launch, Certificate]) -> list[tuple[Certificate, list[Launch]]]:
    """Launches by equal certificate, most first; one with anything unresolved stands alone."""
    found: list[tuple[Certificate, list[Launch]]] = []
    for launch, certificate in certificates.items():
        for known, members in found:
            if known == certificate and not certificate.unresolved:
                members.append(launch)
                break
        else:
            found.append((certificate, [launch]))
    return sorted(found, key=lambda entry: -len(entry[1]))
