"""Scalar instructions, lane masks in scalar registers, branches and the execution mask."""

from __future__ import annotations

import numpy as np

from te_overrides.audit import symbolic
from te_overrides.audit.decode import Instruction, Operand
from te_overrides.audit.isa.compare import INTEGER_CONDITIONS
from te_overrides.audit.machine import EXEC, HANDLERS, VCC, Machine, handler
from te_overrides.audit.memory import Unmodelled
from te_overrides.audit.symbolic import Node, Value

__all__: list[str] = []

_EXEC = Operand("s", EXEC, 2)


def _nonzero(machine: Machine, value: Value) -> Value:
    if isinstance(value, Node):
        return symbolic.unknown("condition code of a value that depends on data", 1)
    return value != 0


def _set_scc(machine: Machine, value: Value) -> None:
    machine.scc = value if machine.active is None else symbolic.lane_mix(machine.active, value, machine.scc)


# -- numbers -------------------------------------------------------------------------------------------------

# opcode without s_: (operation, types of the two sources, order, whether SCC is "result is not zero")
_BINARY = {
    "add_i32": ("add.u32", "u32", "u32", False), "sub_i32": ("sub.u32", "u32", "u32", False),
    "mul_i32": ("mul.u32", "u32", "u32", None), "mul_hi_u32": ("mulhi.u32", "u32", "u32", None),
    "mul_hi_i32": ("mulhi.i32", "i32", "i32", None),
    "lshl_b32": ("shl.u32", "u32", "u32", True), "lshr_b32": ("shr.u32", "u32", "u32", True),
    "ashr_i32": ("shr.i32", "i32", "u32", True), "lshl_b64": ("shl.u64", "u64", "u32", True),
    "lshr_b64": ("shr.u64", "u64", "u32", True), "ashr_i64": ("shr.i64", "i64", "u32", True),
}  # fmt: skip


def _binary(machine: Machine, instruction: Instruction) -> None:
    name, left, right, scc = _BINARY[instruction.opcode[2:]]
    destination, a, b = instruction.operands
    result = machine.op(name, machine.read(a, left), machine.read(b, right))
    machine.write(destination, result)
    if scc is not None:
        # The signed overflow of s_add_i32 has no reader in compiled code; reading it stops the audit.
        _set_scc(machine, _nonzero(machine, result) if scc else symbolic.unknown("signed overflow", 1))


for _name in _BINARY:
    HANDLERS[f"s_{_name}"] = _binary


@handler("s_add_u32", "s_sub_u32", "s_addc_u32", "s_subb_u32")
def _carry(machine: Machine, instruction: Instruction) -> None:
    destination, a, b = instruction.operands
    left, right = machine.read(a, "u32"), machine.read(b, "u32")
    carry = machine.scc if instruction.opcode[5] in "cb" else np.zeros((1, 1), np.bool_)
    name = instruction.opcode[2:5]
    machine.write(destination, machine.op(f"{name}c.u32", left, right, carry))
    _set_scc(machine, machine.op(f"carry.{name}", left, right, carry))


@handler("s_min_i32", "s_min_u32", "s_max_i32", "s_max_u32")
def _extreme(machine: Machine, instruction: Instruction) -> None:
    _, name, kind = instruction.opcode.split("_")
    destination, a, b = instruction.operands
    left, right = machine.read(a, kind), machine.read(b, kind)
    result = machine.op(f"{name}.{kind}", left, right)
    machine.write(destination, result)
    pair = (left, right) if name == "min" else (right, left)
    _set_scc(machine, machine.op(f"lt.{kind}", *pair))


@handler("s_bfe_u32", "s_bfe_i32")
def _bfe(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.opcode[-3:]
    destination, a, b = instruction.operands
    field = machine.read(b, "u32")
    if isinstance(field, Node):
        raise Unmodelled("a bit field chosen by data")
    offset, width = field & np.uint32(31), (field >> np.uint32(16)) & np.uint32(0x7F)
    result = machine.op(f"bfe.{kind}", machine.read(a, kind), offset, width)
    machine.write(destination, result)
    _set_scc(machine, _nonzero(machine, result))


def _signed16(operand: Operand) -> np.ndarray:
    number = int(operand.value) & 0xFFFF
    return np.full((1, 1), number - 0x10000 if number & 0x8000 else number, np.int32).view(np.uint32)


@handler("s_movk_i32", "s_addk_i32", "s_mulk_i32")
def _short(machine: Machine, instruction: Instruction) -> None:
    destination, constant = instruction.operands
    value: Value = _signed16(constant)
    if instruction.opcode == "s_addk_i32":
        value = machine.op("add.u32", machine.read(destination, "u32"), value)
        _set_scc(machine, symbolic.unknown("signed overflow", 1))
    elif instruction.opcode == "s_mulk_i32":
        value = machine.op("mul.u32", machine.read(destination, "u32"), value)
    machine.write(destination, value)


@handler("s_mov_b32")
def _mov32(machine: Machine, instruction: Instruction) -> None:
    machine.write(instruction.operands[0], machine.read(instruction.operands[1], "u32"))


@handler("s_sext_i32_i16", "s_sext_i32_i8", "s_abs_i32", "s_brev_b32", "s_ff1_i32_b32", "s_flbit_i32_b32")
def _unary(machine: Machine, instruction: Instruction) -> None:
    destination, a = instruction.operands
    value = machine.read(a, "u32")
    opcode = instruction.opcode
    if opcode.startswith("s_sext"):
        width = np.full((1, 1), 16 if opcode.endswith("i16") else 8, np.uint32)
        value = machine.op("bfe.i32", value, np.zeros((1, 1), np.uint32), width)
    elif opcode == "s_abs_i32":
        negated = machine.op("sub.u32", np.zeros((1, 1), np.uint32), value)
        value = machine.op("max.i32", value, negated)
        _set_scc(machine, _nonzero(machine, value))
    else:
        names = {"s_brev_b32": "reverse.u32", "s_ff1_i32_b32": "ctz.u32", "s_flbit_i32_b32": "clz.u32"}
        value = machine.op(names[opcode], value)
    machine.write(destination, value)


@handler("s_lshl1_add_u32", "s_lshl2_add_u32", "s_lshl3_add_u32", "s_lshl4_add_u32")
def _lshl_add(machine: Machine, instruction: Instruction) -> None:
    destination, a, b = instruction.operands
    shift = np.full((1, 1), int(instruction.opcode[6]), np.uint32)
    shifted = machine.op("shl.u32", machine.read(a, "u32"), shift)
    machine.write(destination, machine.op("add.u32", shifted, machine.read(b, "u32")))
    _set_scc(machine, symbolic.unknown("carry of a shift and add", 1))


@handler("s_pack_ll_b32_b16", "s_pack_lh_b32_b16", "s_pack_hh_b32_b16")
def _pack(machine: Machine, instruction: Instruction) -> None:
    destination, a, b = instruction.operands
    names = {"l": "lo16", "h": "hi16"}
    low, high = (
        machine.op(names[instruction.opcode[7 + slot]], machine.read(operand, "u32"))
        for slot, operand in enumerate((a, b))
    )
    machine.write(destination, machine.op("pack16", low, high))


def _compare(machine: Machine, instruction: Instruction) -> None:
    _, _, condition, kind = instruction.opcode.split("_")
    if any(operand.kind == "s" and operand.index in machine.masks for operand in instruction.operands):
        _compare_masks(machine, instruction, condition)
        return
    name, exchange, negate = INTEGER_CONDITIONS[condition]
    a, b = (machine.read(operand, kind) for operand in instruction.operands)
    kind = "u" + kind[1:] if name == "eq" else kind
    value = machine.op(f"{name}.{kind}", *((b, a) if exchange else (a, b)))
    _set_scc(machine, symbolic.invert(value) if negate else value)


def _compare_masks(machine: Machine, instruction: Instruction, condition: str) -> None:
    a, b = (machine.read_mask(operand) for operand in instruction.operands)
    if isinstance(a, Node) or isinstance(b, Node):
        _set_scc(machine, symbolic.unknown("comparison of masks that depend on data", 1))
        return
    same = (np.broadcast_to(a == b, (machine.waves, machine.lanes))).all(axis=1)[:, None]
    _set_scc(machine, same if condition == "eq" else ~same)


for _condition in INTEGER_CONDITIONS:
    for _kind in ("i32", "u32", "u64"):
        HANDLERS[f"s_cmp_{_condition}_{_kind}"] = _compare


def _compare_short(machine: Machine, instruction: Instruction) -> None:
    """Against a 16-bit constant, extended as the comparison is signed or not."""
    _, _, condition, kind = instruction.opcode.split("_")
    a, constant = instruction.operands
    short = int(constant.value) & 0xFFFF
    right: Value = np.full((1, 1), short, np.uint32) if kind == "u32" else _signed16(constant)
    name, exchange, negate = INTEGER_CONDITIONS[condition]
    left = machine.read(a, kind)
    kind = "u32" if name == "eq" else kind
    value = machine.op(f"{name}.{kind}", *((right, left) if exchange else (left, right)))
    _set_scc(machine, symbolic.invert(value) if negate else value)


for _condition in INTEGER_CONDITIONS:
    for _kind in ("i32", "u32"):
        HANDLERS[f"s_cmpk_{_condition}_{_kind}"] = _compare_short


@handler("s_bitcmp0_b32", "s_bitcmp1_b32")
def _bitcmp(machine: Machine, instruction: Instruction) -> None:
    a, bit = (machine.read(operand, "u32") for operand in instruction.operands)
    picked = machine.op("and.u32", machine.op("shr.u32", a, bit), np.full((1, 1), 1, np.uint32))
    value = _nonzero(machine, picked)
    _set_scc(machine, value if instruction.opcode[8] == "1" else symbolic.invert(value))


@handler("s_cselect_b32", "s_cselect_b64")
def _cselect(machine: Machine, instruction: Instruction) -> None:
    destination, a, b = instruction.operands
    if _is_mask(machine, instruction, instruction.operands[1:]):
        yes, no = machine.read_mask(a), machine.read_mask(b)
        machine.write_mask(destination, symbolic.make("select", 1, (machine.scc, yes, no)))
        return
    kind = "u64" if instruction.opcode.endswith("64") else "u32"
    yes, no = machine.read(a, kind), machine.read(b, kind)
    machine.write(destination, symbolic.make("select", symbolic.bits_of(yes), (machine.scc, yes, no)))


# -- masks ---------------------------------------------------------------------------------------------------


def _is_mask(machine: Machine, instruction: Instruction, operands: tuple[Operand, ...]) -> bool:
    """Whether an instruction on scalars works on lane masks: one of its operands is one, or is VCC or EXEC."""
    if (machine.mask_words == 2) != instruction.opcode.endswith("64"):
        return False
    return any(
        operand.kind == "s" and (operand.index in machine.masks or operand.index in (VCC, EXEC))
        for operand in operands
    )


def _combine(name: str, a: Value, b: Value) -> Value:
    def binary(op: str, left: Value, right: Value) -> Value:
        if isinstance(left, Node) or isinstance(right, Node):
            return symbolic.make(f"{op}.b1", 1, (left, right))
        return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[op](left, right)

    if name in ("andn2", "and_not1", "orn2", "or_not1"):
        return binary(name[: 3 if name[0] == "a" else 2], a, symbolic.invert(b))
    if name in ("nand", "nor", "xnor"):
        return symbolic.invert(binary({"nand": "and", "nor": "or", "xnor": "xor"}[name], a, b))
    return binary(name, a, b)


def _any_lane(machine: Machine, value: Value) -> Value:
    if isinstance(value, Node):
        return symbolic.unknown("whether a mask that depends on data is empty", 1)
    return np.broadcast_to(value, (machine.waves, machine.lanes)).any(axis=1)[:, None]


_LOGIC = ("and", "or", "xor", "andn2", "orn2", "and_not1", "or_not1", "nand", "nor", "xnor")


def _logic(machine: Machine, instruction: Instruction) -> None:
    name = instruction.opcode[2:].rsplit("_", 1)[0]
    destination, a, b = instruction.operands
    if _is_mask(machine, instruction, instruction.operands):
        value = _combine(name, machine.read_mask(a), machine.read_mask(b))
        machine.write_mask(destination, value)
        _set_scc(machine, _any_lane(machine, value))
        return
    kind = "u64" if instruction.opcode.endswith("64") else "u32"
    left, right = machine.read(a, kind), machine.read(b, kind)
    if name in ("andn2", "orn2", "and_not1", "or_not1"):
        right = machine.op(f"not.{kind}", right)
    base = {
        "andn2": "and", "and_not1": "and", "orn2": "or", "or_not1": "or",
        "nand": "and", "nor": "or", "xnor": "xor",
    }.get(name, name)  # fmt: skip
    result = machine.op(f"{base}.{kind}", left, right)
    if name in ("nand", "nor", "xnor"):
        result = machine.op(f"not.{kind}", result)
    machine.write(destination, result)
    _set_scc(machine, _nonzero(machine, result))


for _name in _LOGIC:
    HANDLERS[f"s_{_name}_b32"] = _logic
    HANDLERS[f"s_{_name}_b64"] = _logic


@handler("s_mov_b64", "s_not_b64", "s_not_b32")
def _mov64(machine: Machine, instruction: Instruction) -> None:
    destination, a = instruction.operands
    inverted = instruction.opcode.startswith("s_not")
    if _is_mask(machine, instruction, instruction.operands):
        value = machine.read_mask(a)
        value = symbolic.invert(value) if inverted else value
        machine.write_mask(destination, value)
        if inverted:
            _set_scc(machine, _any_lane(machine, value))
        return
    kind = "u" + instruction.opcode[-2:]
    value = machine.read(a, kind)
    if inverted:
        value = machine.op(f"not.{kind}", value)
        _set_scc(machine, _nonzero(machine, value))
    machine.write(destination, value)


def _saveexec(machine: Machine, instruction: Instruction) -> None:
    """The source combined with the old execution mask, which is saved."""
    name = instruction.opcode[2:].rsplit("_saveexec_", 1)[0]
    destination, a = instruction.operands
    old, source = machine.exec, machine.read_mask(a)
    if name in ("andn1", "and_not0"):
        value = _combine("andn2", old, source)
    else:
        value = _combine(name, source, old)
    # In this order: a region that ends here ends before the register is written.
    machine.set_exec(value)
    machine.write_mask(destination, old)
    _set_scc(machine, _any_lane(machine, value))


for _name in (*_LOGIC, "andn1", "and_not0"):
    HANDLERS[f"s_{_name}_saveexec_b64"] = _saveexec
    HANDLERS[f"s_{_name}_saveexec_b32"] = _saveexec


# -- branches ------------------------------------------------------------------------------------------------


@handler("s_endpgm")
def _endpgm(machine: Machine, instruction: Instruction) -> None:
    machine.stop()


@handler("s_branch")
def _branch(machine: Machine, instruction: Instruction) -> None:
    machine.jump(str(instruction.operands[0].value))


def _per_wave(machine: Machine, value: Value) -> np.ndarray:
    if isinstance(value, Node):
        why = "; ".join(sorted(value.why)) or "data"
        raise Unmodelled(f"branch of a whole wave on {why}")
    return np.broadcast_to(value, (machine.waves, value.shape[1])).any(axis=1)


@handler("s_cbranch_scc0", "s_cbranch_scc1")
def _branch_scc(machine: Machine, instruction: Instruction) -> None:
    taken = _per_wave(machine, machine.scc)
    wanted = taken if instruction.opcode.endswith("1") else ~taken
    machine.jump(str(instruction.operands[0].value), wanted)


@handler("s_cbranch_vccz", "s_cbranch_vccnz")
def _branch_vcc(machine: Machine, instruction: Instruction) -> None:
    some = _per_wave(machine, machine.read_mask(Operand("s", VCC, 2)))
    wanted = some if instruction.opcode.endswith("nz") else ~some
    machine.jump(str(instruction.operands[0].value), wanted)


@handler("s_cbranch_execz", "s_cbranch_execnz")
def _branch_exec(machine: Machine, instruction: Instruction) -> None:
    nonzero = instruction.opcode.endswith("nz")
    label = str(instruction.operands[0].value)
    if not isinstance(machine.exec, Node):
        some = machine.exec.any(axis=1)
        machine.jump(label, some if nonzero else ~some)
        return
    # Some lane may be active: run the guarded code, in which inactive lanes change nothing.
    here = machine.program.instructions.index(instruction)
    if nonzero and machine.program.labels.get(label, -1) <= here:
        raise Unmodelled("a loop whose end depends on data")
    machine.enter_region()
    if nonzero:
        machine.jump(label)
