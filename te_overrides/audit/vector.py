"""Vector instructions that need more than the table: modifiers, packed math, comparisons, carries, lanes."""

from __future__ import annotations

import numpy as np

from te_overrides.audit import symbolic
from te_overrides.audit.decode import Instruction, Operand
from te_overrides.audit.isa import ALU, SEMANTICS
from te_overrides.audit.isa.compare import FLOAT_CONDITIONS, INTEGER_CONDITIONS
from te_overrides.audit.machine import HANDLERS, VCC, Machine, handler
from te_overrides.audit.memory import Unmodelled
from te_overrides.audit.symbolic import Node, Value

__all__: list[str] = []

_VCC = Operand("s", VCC, 2)
_NO = np.zeros((1, 1), np.bool_)
_PLAIN_MODIFIERS = {"clamp", "mul", "div", "op_sel", "op_sel_hi"}
_SELECTS = {"DWORD": None, "WORD_0": "lo16", "WORD_1": "hi16"}


def _refuse(instruction: Instruction, allowed: set[str]) -> None:
    strange = instruction.modifiers.keys() - allowed
    if instruction.encoding in ("dpp", "e64_dpp", "dpp8"):
        raise Unmodelled("data-parallel primitives (lanes exchange values)")
    if strange:
        raise Unmodelled(f"modifiers {sorted(strange)}")


def _source(machine: Machine, instruction: Instruction, position: int, kind: str) -> Value:
    operand = instruction.operands[position]
    value = machine.read(operand, kind)
    select = instruction.modifiers.get(f"src{position - 1}_sel", "DWORD")
    if select == "DWORD":
        return value
    if operand.neg or operand.abs:
        raise Unmodelled("sign modifiers with a sub-register select")
    word = machine.read(operand, "u32")
    if select in ("WORD_0", "WORD_1"):
        half = machine.op("lo16" if select == "WORD_0" else "hi16", word)
        if kind.endswith("16"):
            return half
        return machine.op("pack16", half, np.zeros((1, 1), np.uint16))
    byte = np.full((1, 1), 8 * int(str(select)[-1]), np.uint32)
    return machine.op("bfe.u32", word, byte, np.full((1, 1), 8, np.uint32))


def _finish(machine: Machine, instruction: Instruction, value: Value, kind: str) -> None:
    """Output modifiers, in the hardware's order: omod, then clamp; then the write."""
    modifiers = instruction.modifiers
    if "mul" in modifiers or "div" in modifiers:
        factor = float(str(modifiers["mul"])) if "mul" in modifiers else 1 / float(str(modifiers["div"]))
        machine_factor = machine.read(Operand("fimm", value=factor), kind)
        value = machine.op(f"mul.{kind}", value, machine_factor)
    if "clamp" in modifiers:
        if kind[0] != "f":
            raise Unmodelled("clamp of integers")
        value = machine.op(f"clamp.{kind}", value)
    select = modifiers.get("dst_sel", "DWORD")
    destination = instruction.operands[0]
    if select == "DWORD":
        machine.write(destination, value)
        return
    if select not in ("WORD_0", "WORD_1"):
        raise Unmodelled(f"dst_sel {select}")
    half = value if symbolic.bits_of(value) == 16 else machine.op("lo16", value)
    zero: Value = np.zeros((1, 1), np.uint16)
    unused = modifiers.get("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise Unmodelled(f"dst_unused {unused}")
    if unused == "UNUSED_PRESERVE":
        zero = machine.op("hi16" if select == "WORD_0" else "lo16", machine.read(destination, "u32"))
    machine.write(destination, machine.op("pack16", *((half, zero) if select == "WORD_0" else (zero, half))))


_SDWA = {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}


def _alu(machine: Machine, instruction: Instruction) -> None:
    spec = ALU[instruction.opcode]
    semantic = SEMANTICS[spec.semantic]
    if instruction.encoding == "dpp":
        HANDLERS["dpp"](machine, instruction)
        return
    _refuse(instruction, {"clamp", "mul", "div"} | _SDWA)
    args = []
    for slot, position in enumerate(spec.order):
        kind = semantic.sources[slot]
        value = _source(machine, instruction, position, kind)
        if slot in spec.negate:
            value = machine.op(f"neg.{kind}", value)
        args.append(value)
    _finish(machine, instruction, machine.op(spec.semantic, *args), semantic.out)


for _opcode in ALU:
    HANDLERS[_opcode] = _alu


@handler("v_nop", "s_nop", "s_waitcnt", "s_waitcnt_depctr", "s_sleep", "s_setprio", "s_barrier", "s_clause")
@handler("s_delay_alu", "s_sethalt", "s_inst_prefetch", "s_set_gpr_idx_off", "buffer_wbl2", "buffer_inv")
@handler("s_wait_loadcnt", "s_wait_kmcnt", "s_wait_dscnt", "s_wait_storecnt", "s_dcache_wb", "s_sendmsg")
@handler("sched_barrier", "s_set_inst_prefetch_distance", "s_icache_inv", "s_code_end")
def _nothing(machine: Machine, instruction: Instruction) -> None:
    """Timing and caches: no effect on values."""


@handler("v_dual")
def _dual(machine: Machine, instruction: Instruction) -> None:
    """Both halves read before either writes."""
    first, second = instruction.pair
    written = first.operands[0].index
    registers = machine.registers["v"]
    before = registers.get(written)
    for half in (first, second):
        if half.opcode not in HANDLERS:
            raise Unmodelled(f"instruction {half.opcode}")
    HANDLERS[first.opcode](machine, first)
    after = registers.pop(written)
    if before is not None:
        registers[written] = before
    HANDLERS[second.opcode](machine, second)
    registers[written] = after


# -- comparisons ---------------------------------------------------------------------------------------------


def _compare(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, _SDWA)
    _, kind_of, condition, kind = instruction.opcode.split("_")
    table = FLOAT_CONDITIONS if kind[0] == "f" else INTEGER_CONDITIONS
    name, exchange, negate = table[condition]
    left = _source(machine, instruction, 1, kind)
    right = _source(machine, instruction, 2, kind)
    # Integer equality does not care for signs: one name for both.
    kind = "u" + kind[1:] if name == "eq" and kind[0] == "i" else kind
    value = machine.op(f"{name}.{kind}", *((right, left) if exchange else (left, right)))
    if negate:
        value = symbolic.invert(value)
    _write_condition(machine, instruction, value, kind_of == "cmpx")


def _write_condition(machine: Machine, instruction: Instruction, value: Value, to_exec: bool) -> None:
    """Inactive lanes give zero bits."""
    value = machine_and(machine.exec, value)
    machine.write_mask(instruction.operands[0], value)
    if to_exec:
        machine.set_exec(value)


def machine_and(left: Value, right: Value) -> Value:
    if isinstance(left, Node) or isinstance(right, Node):
        return symbolic.make("and.b1", 1, (left, right))
    return left & right


for _kind in ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64"):
    for _condition in FLOAT_CONDITIONS if _kind[0] == "f" else INTEGER_CONDITIONS:
        for _which in ("cmp", "cmpx"):
            HANDLERS[f"v_{_which}_{_condition}_{_kind}"] = _compare


@handler("v_cmp_class_f16", "v_cmp_class_f32", "v_cmp_class_f64")
def _class(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    kind = instruction.opcode.rsplit("_", 1)[1]
    left = machine.read(instruction.operands[1], kind)
    value = machine.op(f"class.{kind}", left, machine.read(instruction.operands[2], "u32"))
    _write_condition(machine, instruction, value, False)


@handler("v_cndmask_b32")
def _cndmask(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, _SDWA)
    condition = machine.read_condition(instruction.operands[3] if len(instruction.operands) > 3 else _VCC)
    kinds = "f32" if any(operand.neg or operand.abs for operand in instruction.operands[1:3]) else "u32"
    no, yes = (_source(machine, instruction, position, kinds) for position in (1, 2))
    _finish(machine, instruction, symbolic.make("select", 32, (condition, yes, no)), "u32")


# -- integers of several steps -------------------------------------------------------------------------------


def _chain(first: str, second: str, order: tuple[int, int, int]):  # noqa: ANN202
    """`second(first(a, b), c)` of three operands, in the given order."""

    def run(machine: Machine, instruction: Instruction) -> None:
        _refuse(instruction, set())
        a, b, c = (machine.read(instruction.operands[position], "u32") for position in order)
        machine.write(instruction.operands[0], machine.op(second, machine.op(first, a, b), c))

    return run


HANDLERS |= {
    "v_lshl_add_u32": _chain("shl.u32", "add.u32", (1, 2, 3)),
    "v_add_lshl_u32": _chain("add.u32", "shl.u32", (1, 2, 3)),
    "v_lshl_or_b32": _chain("shl.u32", "or.u32", (1, 2, 3)),
    "v_and_or_b32": _chain("and.u32", "or.u32", (1, 2, 3)),
    "v_or3_b32": _chain("or.u32", "or.u32", (1, 2, 3)),
    "v_add3_u32": _chain("add.u32", "add.u32", (1, 2, 3)),
    "v_xad_u32": _chain("xor.u32", "add.u32", (1, 2, 3)),
    "v_mad_u32_u24": _chain("mul24.u32", "add.u32", (1, 2, 3)),
    "v_mad_i32_i24": _chain("mul24.i32", "add.u32", (1, 2, 3)),
}


@handler("v_bfi_b32")
def _bfi(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    mask, a, b = (machine.read(operand, "u32") for operand in instruction.operands[1:4])
    kept = machine.op("and.u32", a, mask)
    rest = machine.op("and.u32", b, machine.op("not.u32", mask))
    machine.write(instruction.operands[0], machine.op("or.u32", kept, rest))


@handler("v_bitop3_b32")
def _bitop3(machine: Machine, instruction: Instruction) -> None:
    """Any function of three bits: bit 4a + 2b + c of the table."""
    _refuse(instruction, {"bitop3"})
    table = int(str(instruction.modifiers.get("bitop3", "0")), 0)
    sources = [machine.read(operand, "u32") for operand in instruction.operands[1:4]]
    result: Value = np.zeros((1, 1), np.uint32)
    for entry in range(8):
        if table >> entry & 1:
            term: Value = np.full((1, 1), 0xFFFFFFFF, np.uint32)
            for position, source in enumerate(sources):
                wanted = source if entry >> (2 - position) & 1 else machine.op("not.u32", source)
                term = machine.op("and.u32", term, wanted)
            result = machine.op("or.u32", result, term)
    machine.write(instruction.operands[0], result)


@handler("v_lshl_add_u64")
def _lshl_add_u64(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    _, a, shift, b = instruction.operands
    shifted = machine.op("shl.u64", machine.read(a, "u64"), machine.read(shift, "u32"))
    machine.write(instruction.operands[0], machine.op("add.u64", shifted, machine.read(b, "u64")))


@handler("v_mad_u64_u32", "v_mad_i64_i32")
def _mad_wide(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    destination, _, a, b, c = instruction.operands
    product = machine.op(
        "mulwide.u64" if "u64" in instruction.opcode else "mulwide.i64",
        machine.read(a, "u32"), machine.read(b, "u32"),
    )  # fmt: skip
    machine.write(destination, machine.op("add.u64", product, machine.read(c, "u64")))
    carry = instruction.operands[1]
    if carry.kind == "s":
        machine.write_mask(carry, symbolic.unknown("carry of a 64-bit multiply-add", 1))


def _carry(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    opcode = instruction.opcode
    destination, out, a, b = instruction.operands[:4]
    left, right = machine.read(a, "u32"), machine.read(b, "u32")
    if "rev" in opcode:
        left, right = right, left
    with_carry = opcode.startswith(("v_addc", "v_subb", "v_add_co_ci", "v_sub_co_ci", "v_subrev_co_ci"))
    carry_in = machine.read_condition(instruction.operands[4]) if with_carry else _NO
    name = "add" if opcode.startswith("v_add") else "sub"
    result = (
        machine.op(f"{name}c.u32", left, right, carry_in)
        if with_carry
        else machine.op(f"{name}.u32", left, right)
    )
    carry = machine.op(f"carry.{name}", left, right, carry_in)
    machine.write(destination, result)
    machine.write_mask(out, machine_and(machine.exec, carry))


for _name in ("add", "sub", "subrev", "addc", "subb", "subbrev"):
    HANDLERS[f"v_{_name}_co_u32"] = _carry
for _name in ("add", "sub", "subrev"):
    HANDLERS[f"v_{_name}_co_ci_u32"] = _carry


# -- packed math ---------------------------------------------------------------------------------------------


def _lane_of_pair(machine: Machine, operand: Operand, high: int) -> Value:
    if operand.kind in ("imm", "fimm"):
        if high:
            raise Unmodelled("the upper half of a constant")
        return machine.read(operand, "f32")
    return machine.register(operand.kind, operand.index + high)


@handler("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32")
def _packed(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"})
    destination, *sources = instruction.operands
    count = len(sources)
    modifiers = instruction.modifiers
    name = instruction.opcode.removeprefix("v_pk_").replace("_", ".")
    halves = []
    for half, select, negate in (
        (0, modifiers.get("op_sel", (0,) * count), modifiers.get("neg_lo", (0,) * count)),
        (1, modifiers.get("op_sel_hi", (1,) * count), modifiers.get("neg_hi", (0,) * count)),
    ):
        args = []
        for position, operand in enumerate(sources):
            if name == "mov.b32":
                # The low half comes from the first source, the high half from the second; op_sel picks both.
                select = modifiers.get("op_sel", (0, 0))
            value = _lane_of_pair(machine, operand, select[position])  # type: ignore[index]
            args.append(machine.op("neg.f32", value) if negate[position] else value)  # type: ignore[index]
        halves.append(args[half] if name == "mov.b32" else machine.op(name, *args))
    for half, value in enumerate(halves):
        machine.write(destination, value, half)


@handler("v_pk_add_f16", "v_pk_mul_f16", "v_pk_fma_f16", "v_pk_min_f16", "v_pk_max_f16")
@handler("v_pk_add_u16", "v_pk_add_i16", "v_pk_lshlrev_b16", "v_pk_lshrrev_b16")
def _packed16(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"})
    destination, *sources = instruction.operands
    count = len(sources)
    modifiers = instruction.modifiers
    opcode = instruction.opcode.removeprefix("v_pk_").replace("_", ".")
    names = {"add.i16": "add.u16", "lshlrev.b16": "shl.u16", "lshrrev.b16": "shr.u16"}
    name = names.get(opcode, opcode)
    halves = []
    for select, negate in (
        (modifiers.get("op_sel", (0,) * count), modifiers.get("neg_lo", (0,) * count)),
        (modifiers.get("op_sel_hi", (1,) * count), modifiers.get("neg_hi", (0,) * count)),
    ):
        args = []
        for position, operand in enumerate(sources):
            if operand.kind in ("imm", "fimm"):
                if select[position]:  # type: ignore[index]
                    raise Unmodelled("the upper half of a constant")
                value: Value = machine.read(operand, "f16" if operand.kind == "fimm" else "u16")
            else:
                word = machine.register(operand.kind, operand.index)
                value = machine.op("hi16" if select[position] else "lo16", word)  # type: ignore[index]
            args.append(machine.op("neg.f16", value) if negate[position] else value)  # type: ignore[index]
        if "rev" in opcode:
            args = [args[1], machine.op("pack16", args[0], np.zeros((1, 1), np.uint16))]
        halves.append(machine.op(name, *args))
    machine.write(destination, machine.op("pack16", *halves))


@handler("v_cvt_pk_bf16_f32", "v_cvt_pk_f16_f32")
def _cvt_pk(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    target = instruction.opcode.split("_")[3]
    low, high = (
        machine.op(f"cvt.{target}.f32", machine.read(operand, "f32")) for operand in instruction.operands[1:3]
    )
    machine.write(instruction.operands[0], machine.op("pack16", low, high))


@handler("v_fma_mix_f32")
def _fma_mix(machine: Machine, instruction: Instruction) -> None:
    """float32 multiply-add of which any source may be half of a register: op_sel_hi says which, op_sel which half."""
    _refuse(instruction, {"op_sel", "op_sel_hi"})
    halves = instruction.modifiers.get("op_sel_hi", (0, 0, 0))
    upper = instruction.modifiers.get("op_sel", (0, 0, 0))
    args = []
    for position, operand in enumerate(instruction.operands[1:4]):
        if not halves[position]:  # type: ignore[index]
            args.append(machine.read(operand, "f32"))
            continue
        if operand.kind == "fimm" and not upper[position]:  # type: ignore[index]
            args.append(machine.op("cvt.f32.f16", machine.read(operand, "f16")))
            continue
        if operand.kind not in ("v", "s") or operand.abs:
            raise Unmodelled("half of a constant, or an absolute value of half a register")
        word = machine.register(operand.kind, operand.index)
        value = machine.op("cvt.f32.f16", machine.op("hi16" if upper[position] else "lo16", word))  # type: ignore[index]
        args.append(machine.op("neg.f32", value) if operand.neg else value)
    machine.write(instruction.operands[0], machine.op("fma.f32", *args))


@handler("v_pack_b32_f16")
def _pack(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, {"op_sel"})
    select = instruction.modifiers.get("op_sel", (0, 0, 0))
    halves = []
    for position, operand in enumerate(instruction.operands[1:3]):
        if select[position]:  # type: ignore[index]
            halves.append(machine.op("hi16", machine.read(operand, "u32")))
        else:
            halves.append(machine.read(operand, "f16"))
    machine.write(instruction.operands[0], machine.op("pack16", *halves))


# -- division ------------------------------------------------------------------------------------------------


@handler("v_div_scale_f32", "v_div_scale_f64")
def _div_scale(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    kind = instruction.opcode.rsplit("_", 1)[1]
    destination, flag, *sources = instruction.operands
    args = [machine.read(operand, kind) for operand in sources]
    machine.write(destination, machine.op(f"div_scale.{kind}", *args))
    machine.write_mask(flag, machine_and(machine.exec, machine.op(f"div_scaled.{kind}", *args)))


@handler("v_div_fmas_f32", "v_div_fmas_f64", "v_div_fixup_f32", "v_div_fixup_f64")
def _div_end(machine: Machine, instruction: Instruction) -> None:
    _refuse(instruction, set())
    _, _, step, kind = instruction.opcode.split("_")
    args = [machine.read(operand, kind) for operand in instruction.operands[1:4]]
    if step == "fmas":
        args.append(machine.read_condition(_VCC))
    machine.write(instruction.operands[0], machine.op(f"div_{step}.{kind}", *args))


# -- between lanes and scalars -------------------------------------------------------------------------------


@handler("v_readfirstlane_b32")
def _readfirstlane(machine: Machine, instruction: Instruction) -> None:
    value = machine.read(instruction.operands[1], "u32")
    if isinstance(machine.exec, Node):
        if isinstance(value, Node) or value.shape[1] != 1:
            raise Unmodelled("the first lane of a mask that depends on data")
        machine.write(instruction.operands[0], value)
        return
    first = machine.lanes_on().argmax(axis=1)[:, None]
    machine.write(instruction.operands[0], _lane_of(machine, value, first))


def _constant_lane(machine: Machine, operand: Operand) -> int:
    lane = machine.read(operand, "u32")
    if isinstance(lane, Node) or (lane != lane.flat[0]).any():
        raise Unmodelled("a lane number that is not one constant")
    return int(lane.flat[0])


@handler("v_writelane_b32")
def _writelane(machine: Machine, instruction: Instruction) -> None:
    """Scalars are spilled this way; the register holds nothing else then."""
    destination, source, lane = instruction.operands
    if machine.active is not None:
        raise Unmodelled("a scalar is spilled in some waves only")
    machine.spilled[destination.index, _constant_lane(machine, lane)] = machine.read(source, "u32")


@handler("v_readlane_b32")
def _readlane(machine: Machine, instruction: Instruction) -> None:
    destination, source, lane = instruction.operands
    number = _constant_lane(machine, lane)
    if (source.index, number) in machine.spilled:
        machine.write(destination, machine.spilled[source.index, number])
        return
    # Whether the lane is active does not matter here, only whether the wave runs.
    value = machine.registers["v"].get(source.index)
    if value is None or number >= machine.lanes:
        raise Unmodelled("a lane nothing was written to becomes a scalar")
    if machine.active is not None:
        value = symbolic.assume(value, np.broadcast_to(machine.active, (machine.waves, machine.lanes)), set())
    machine.write(destination, _lane_of(machine, value, np.full((machine.waves, 1), number)))


def _lane_of(machine: Machine, value: Value, lane: np.ndarray) -> Value:
    """One lane of each wave, as a scalar [W, 1]."""
    shape = (machine.waves, machine.lanes)
    if not isinstance(value, Node):
        return np.take_along_axis(np.broadcast_to(value, shape), lane, axis=1)
    h = np.take_along_axis(
        np.broadcast_to(value.h, (2, *shape)), np.broadcast_to(lane, (2, *lane.shape)), axis=2
    )
    bad = np.take_along_axis(np.broadcast_to(value.bad, shape), lane, axis=1)
    return Node("one lane", (), value.bits, h, bad if bad.any() else np.zeros((1, 1), np.bool_), value.why)


@handler("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _mbcnt(machine: Machine, instruction: Instruction) -> None:
    word = 0 if "_lo_" in instruction.opcode else 1
    mask, base = (machine.read(operand, "u32") for operand in instruction.operands[1:3])
    if isinstance(mask, Node):
        raise Unmodelled("a count over a mask that depends on data")
    lane = np.arange(machine.lanes)[None]
    below = np.clip(lane - 32 * word, 0, 32).astype(np.uint64)
    ones = mask.astype(np.uint64) & ((np.uint64(1) << below) - np.uint64(1))
    machine.write(
        instruction.operands[0], machine.op("add.u32", np.bitwise_count(ones).astype(np.uint32), base)
    )
