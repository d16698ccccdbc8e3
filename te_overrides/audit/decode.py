"""Read the assembly Triton's AMD backend prints: one kernel's instructions, labels, directives and arguments.

The text is LLVM's own (`asm["amdgcn"]`), so every operand form LLVM prints is either decoded here or refused
with `DecodeError`; nothing is skipped because it looks unfamiliar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["Argument", "DecodeError", "Instruction", "Operand", "Program", "decode"]

_SPECIAL = {
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1),
    "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
    "m0": (124, 1), "flat_scratch": (102, 2),
}  # fmt: skip
_SPLIT = re.compile(r",\s*(?![^\[]*\])")
_LIST_MODIFIER = re.compile(r"\s*\b(op_sel|op_sel_hi|neg_lo|neg_hi):\[([\d,]+)\]")
_PAIR_MODIFIER = re.compile(
    r"\s*\b(offset|offset0|offset1|mul|div|cbsz|abid|blgp|dst_sel|dst_unused|src0_sel|src1_sel|row_shl|row_shr|row_ror|wave_shr"
    r"|wave_ror|row_bcast|row_mask|bank_mask|bound_ctrl|quad_perm|row_newbcast|bitop3|dpp8|format|scope|th"
    r"|row_share|row_xmask|fi):(\[[\d,]+\]|[\w-]+)"
)
_FLAG_MODIFIERS = (
    "clamp offen idxen glc slc dlc nt sc0 sc1 lds tfe gds off row_mirror row_half_mirror high unorm".split()
)


class DecodeError(ValueError):
    """The text is not the assembly of one kernel as LLVM prints it."""


@dataclass(frozen=True)
class Operand:
    """One operand: `kind` is v, s, a (registers `index` … `index + count - 1`), imm, fimm, off, label or name."""

    kind: str
    index: int = 0
    count: int = 1
    value: float | int | str = 0
    neg: bool = False
    abs: bool = False


@dataclass(frozen=True)
class Instruction:
    """One machine instruction; `opcode` is without the `_e32`/`_e64`/`_sdwa`/`_dpp` ending, which is `encoding`.

    `pair` holds the two halves of a dual-issue instruction, whose opcode is then `v_dual`.
    """

    opcode: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, object] = field(default_factory=dict)
    text: str = ""
    line: int = 0
    pair: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Argument:
    """A kernel argument as the code object's metadata lists it: byte offset and size in the argument segment."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Program:
    """A decoded kernel: `labels` map a name to the index of the instruction it stands before."""

    name: str
    arch: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    directives: dict[str, int]
    arguments: tuple[Argument, ...]

    @property
    def wave_size(self) -> int:
        return 32 if self.directives.get("wavefront_size32") else 64


def _register(text: str) -> Operand | None:
    match = re.fullmatch(r"([vsa])(\d+)", text)
    if match:
        return Operand(match[1], int(match[2]))
    match = re.fullmatch(r"([vsa])\[(\d+):(\d+)\]", text)
    if match:
        return Operand(match[1], int(match[2]), int(match[3]) - int(match[2]) + 1)
    if text in _SPECIAL:
        return Operand("s", *_SPECIAL[text])
    return None


def _operand(text: str) -> Operand:
    text = text.strip()
    if re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", text):
        return Operand("imm", value=int(text, 0))
    if re.fullmatch(r"-?\d+\.\d+(e[-+]?\d+)?", text):
        return Operand("fimm", value=float(text))
    if text == "neg(0)":
        # An integer constant with a sign modifier: the bits of 0 negated as a float.
        return Operand("fimm", value=-0.0)
    neg = text.startswith("-")
    inner = text[1:] if neg else text
    absolute = inner.startswith("|") and inner.endswith("|")
    inner = inner.strip("|") if absolute else inner
    register = _register(inner)
    if register is not None:
        return Operand(register.kind, register.index, register.count, neg=neg, abs=absolute)
    if inner == "off":
        return Operand("off")
    if inner.startswith((".L", "@")):
        return Operand("label", value=inner)
    return Operand("name", value=text)


def _instruction(text: str, line: int) -> Instruction:
    if "::" in text:
        halves = (part.strip().replace("v_dual_", "v_", 1) for part in text.split("::"))
        return Instruction("v_dual", "", text=text, line=line, operands=(), pair=tuple(
            _instruction(half, line) for half in halves
        ))  # fmt: skip
    opcode, _, rest = text.partition(" ")
    modifiers: dict[str, object] = {}
    for match in _LIST_MODIFIER.finditer(rest):
        modifiers[match[1]] = tuple(int(bit) for bit in match[2].split(","))
    rest = _LIST_MODIFIER.sub("", rest)
    for match in _PAIR_MODIFIER.finditer(rest):
        modifiers[match[1]] = match[2]
    rest = _PAIR_MODIFIER.sub("", rest)
    words = rest.split()
    while words and words[-1] in _FLAG_MODIFIERS and not words[-1].endswith(",") and len(words) > 1:
        if words[-1] == "off" and words[-2].endswith(","):
            break
        modifiers[words.pop()] = True
    rest = " ".join(words)
    encoding = ""
    match = re.fullmatch(r"(\w+?)_(e32|e64|sdwa|dpp|e64_dpp|dpp8)", opcode)
    if match:
        opcode, encoding = match[1], match[2]
    if opcode == "s_waitcnt" or opcode.startswith(("s_wait_", "s_waitcnt_", "s_delay_alu", "s_clause")):
        return Instruction(opcode, encoding, (), {}, text, line)
    operands = tuple(_operand(part) for part in _SPLIT.split(rest)) if rest else ()
    return Instruction(opcode, encoding, operands, modifiers, text, line)


def _arguments(assembly: str) -> tuple[Argument, ...]:
    block = re.search(r"\.args:(.*?)\n {4}\.\w", assembly, re.S)
    if block is None:
        return ()
    found = []
    for entry in re.split(r"\n {6}- ", block[1])[1:]:
        fields = dict(re.findall(r"\.(\w+):\s+(\S+)", entry))
        found.append(Argument(int(fields["offset"]), int(fields["size"]), fields["value_kind"]))
    return tuple(found)


def decode(assembly: str) -> Program:
    """Decode the one kernel in `assembly`.

    Args:
        assembly: what `triton.compile(...).asm["amdgcn"]` holds.

    Raises:
        DecodeError: no kernel, or more than one, or no target directive.
    """
    kernels = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", assembly, re.M)
    if len(kernels) != 1:
        raise DecodeError(f"expected one kernel in the assembly, found {len(kernels)}: {kernels}")
    target = re.search(r"\.amdgcn_target\s+\"[^\"]*-(gfx\w+)", assembly)
    if target is None:
        raise DecodeError("no .amdgcn_target in the assembly; is this the text of asm['amdgcn']?")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for number, raw in enumerate(assembly.splitlines(), 1):
        text = raw.split(";", 1)[0].strip()
        if text == f"{kernels[0]}:":
            inside = True
        elif inside and text.startswith(".Lfunc_end"):
            break
        elif inside and text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        elif inside and text and not text.startswith("."):
            instructions.append(_instruction(text, number))
    directives = {
        name: int(value, 0)
        for name, value in re.findall(r"^\s*\.amdhsa_(\w+)\s+(-?\w+)\s*$", assembly, re.M)
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", value)
    }
    return Program(kernels[0], target[1], tuple(instructions), labels, directives, _arguments(assembly))
