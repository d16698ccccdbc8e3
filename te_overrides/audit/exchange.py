"""Values that move between lanes: data-parallel primitives, permutations, and a workgroup's shared memory (LDS).

Which lane reads which is concrete in both engines, so a symbolic value moves by its lane hashes. The waves of
a launch run in step here, so that what one wave writes to shared memory is there for the others; a kernel that lacks
a barrier is not found out.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit import symbolic
from te_overrides.audit.decode import Instruction
from te_overrides.audit.isa import ALU
from te_overrides.audit.machine import HANDLERS, Machine, handler
from te_overrides.audit.memory import Unmodelled
from te_overrides.audit.symbolic import Node, Value

__all__ = ["SharedMemory", "from_lanes", "shared_memory"]

_EMPTY, _NUMBER, _WORD, _HALVES = range(4)


def from_lanes(machine: Machine, value: Value, lane: NDArray[np.int64]) -> Value:
    """`value` [W, L] as lane l sees it when it reads lane `lane[w, l]` of its own wave."""
    shape = (machine.waves, machine.lanes)
    lane = np.broadcast_to(lane, shape)
    if not isinstance(value, Node):
        return np.take_along_axis(np.broadcast_to(value, shape), lane, axis=1)
    h = np.broadcast_to(value.h, (2, *shape))
    moved = np.take_along_axis(h, np.broadcast_to(lane, h.shape), axis=2)
    bad = value.bad
    if bad.any():
        bad = np.take_along_axis(np.broadcast_to(bad, shape), lane, axis=1)
    return Node("from another lane", (), value.bits, moved, bad, value.why)


def _full_exec(machine: Machine) -> NDArray[np.bool_]:
    if isinstance(machine.exec, Node):
        raise Unmodelled("lanes exchange values under a mask that depends on data")
    return machine.lanes_on()


# -- data-parallel primitives --------------------------------------------------------------------------------


def _dpp_source(modifiers: dict[str, object], count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each lane the one it reads, and whether there is such a lane."""
    lane = np.arange(count)
    row, place = lane - lane % 16, lane % 16
    yes = np.ones(count, np.bool_)
    if "quad_perm" in modifiers:
        order = [int(part) for part in re.findall(r"\d+", str(modifiers["quad_perm"]))]
        return lane - lane % 4 + np.array(order)[lane % 4], yes
    for name, sign in (("row_shl", 1), ("row_shr", -1)):
        if name in modifiers:
            source = place + sign * int(str(modifiers[name]))
            inside = (source >= 0) & (source < 16)
            return np.where(inside, row + source, lane), inside
    if "row_ror" in modifiers:
        return row + (place - int(str(modifiers["row_ror"]))) % 16, yes
    if "row_mirror" in modifiers:
        return row + 15 - place, yes
    if "row_half_mirror" in modifiers:
        return lane - lane % 8 + 7 - lane % 8, yes
    if "row_newbcast" in modifiers:
        return row + int(str(modifiers["row_newbcast"])), yes
    if modifiers.get("row_bcast") == "15":
        return np.where(row > 0, row - 1, lane), row > 0
    if modifiers.get("row_bcast") == "31":
        return np.where(lane >= 32, 31, lane), lane >= 32
    raise Unmodelled(f"lane exchange {sorted(modifiers)}")


_DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_newbcast",
        "row_bcast", "row_mask", "bank_mask", "bound_ctrl")  # fmt: skip


def _dpp(machine: Machine, instruction: Instruction) -> None:
    """Read the first source from another lane, then run the plain instruction where lanes take part."""
    modifiers = instruction.modifiers
    on = _full_exec(machine)
    if machine.active is not None or instruction.opcode not in ALU or instruction.encoding != "dpp":
        raise Unmodelled("data-parallel primitives of this form")
    source, exists = _dpp_source(modifiers, machine.lanes)
    lane = np.arange(machine.lanes)
    rows, banks = (int(str(modifiers.get(name, "0xf")), 0) for name in ("row_mask", "bank_mask"))
    part = (rows >> (lane // 16) & 1 == 1) & (banks >> (lane % 16 // 4) & 1 == 1)
    valid = exists[None] & np.take_along_axis(on, np.broadcast_to(source, on.shape), axis=1)
    first = instruction.operands[1]
    if first.kind != "v" or first.neg or first.abs:
        raise Unmodelled("a first source of this form in a lane exchange")
    raw = machine.registers["v"].get(first.index)
    if raw is None:
        raise Unmodelled("a lane exchange of nothing")
    moved = from_lanes(machine, raw, source[None])
    if "bound_ctrl" in modifiers:
        moved = symbolic.lane_mix(valid, moved, np.zeros((1, 1), np.uint32))
    else:
        part = part[None] & valid
    mask = machine.exec
    accumulates = first.index == instruction.operands[0].index
    if 0 in ALU[instruction.opcode].order and accumulates:
        raise Unmodelled("an accumulating lane exchange onto its own source")
    # The other sources must not see the exchanged value: it gets a register of its own.
    spare = 1 << 20
    machine.registers["v"][spare] = moved
    plain = tuple(modifier for modifier in modifiers.items() if modifier[0] not in _DPP)
    operands = list(instruction.operands)
    operands[1] = type(first)("v", spare)
    machine.set_exec(on & np.broadcast_to(part, on.shape))
    HANDLERS[instruction.opcode](
        machine, Instruction(instruction.opcode, "", tuple(operands), dict(plain), instruction.text)
    )
    machine.set_exec(mask)
    del machine.registers["v"][spare]


HANDLERS["dpp"] = _dpp


@handler("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _permlane_swap(machine: Machine, instruction: Instruction) -> None:
    """Rows of the first register against rows of the second: its odd ones for the other's even ones."""
    if not _full_exec(machine).all():
        raise Unmodelled("a swap of lanes of which some are inactive")
    width = 32 if "32_swap" in instruction.opcode else 16
    lane = np.arange(machine.lanes)
    odd = (lane // width % 2 == 1)[None]
    first, second = instruction.operands[:2]
    a, b = (machine.register("v", operand.index) for operand in (first, second))
    down, up = (np.clip(lane + step, 0, machine.lanes - 1)[None] for step in (-width, width))
    machine.write(first, symbolic.lane_mix(odd, from_lanes(machine, b, down), a))
    machine.write(second, symbolic.lane_mix(odd, b, from_lanes(machine, a, up)))


@handler("ds_bpermute_b32")
def _bpermute(machine: Machine, instruction: Instruction) -> None:
    destination, address, data = instruction.operands
    place = machine.read(address, "u32")
    if isinstance(place, Node) or not _full_exec(machine).all():
        raise Unmodelled("a permutation by data, or with inactive lanes")
    offset = int(str(instruction.modifiers.get("offset", 0)))
    lane = ((place.astype(np.int64) + offset) // 4) % machine.lanes
    machine.write(destination, from_lanes(machine, machine.read(data, "u32"), lane))


# -- shared memory -------------------------------------------------------------------------------------------


class SharedMemory:
    """Words of every workgroup: numbers, expressions, or two 16-bit expressions each."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.kind = np.zeros((groups, 0), np.uint8)
        self.number = np.zeros((groups, 0), np.uint32)
        self.h = np.zeros((2, groups, 0, 2), np.uint64)
        self.bad = np.zeros((groups, 0), np.bool_)
        self.why: frozenset[str] = frozenset()

    def grow(self, words: int) -> None:
        """Make room for `words` words a workgroup."""
        more = words - self.kind.shape[1]
        if more > 0:
            more = max(more, self.kind.shape[1], 256)
            self.kind, self.number, self.bad = (
                np.pad(array, ((0, 0), (0, more))) for array in (self.kind, self.number, self.bad)
            )
            self.h = np.pad(self.h, ((0, 0), (0, 0), (0, more), (0, 0)))

    def store(self, group: NDArray, word: NDArray, on: NDArray[np.bool_], value: Value) -> None:
        self.grow(int(word[on].max()) + 1)
        at = np.broadcast_to(group, on.shape)[on], word[on]
        if not isinstance(value, Node):
            self.kind[at], self.number[at] = _NUMBER, np.broadcast_to(value, on.shape)[on]
            self.bad[at] = False
            return
        halves = value.op == "pack16"
        parts = value.args if halves else (value, value)
        for half, part in enumerate(parts):
            hashes = np.broadcast_to(symbolic.hash_of(part), (2, *on.shape))[:, on]
            self.h[:, at[0], at[1], half] = hashes
        self.kind[at] = _HALVES if halves else _WORD
        self.bad[at] = np.broadcast_to(value.bad, on.shape)[on]
        self.why |= value.why

    def load(self, group: NDArray, word: NDArray, on: NDArray[np.bool_]) -> Value:
        word = np.where(on, word, word[on].min())
        self.grow(int(word.max()) + 1)
        at = np.broadcast_to(group, on.shape), word
        kind = np.where(on, self.kind[at], self.kind[at][on][0])
        numbers = self.number[at]
        if (kind == _EMPTY).any():
            raise Unmodelled("shared memory is read where nothing was written")
        if (kind == _NUMBER).all():
            return numbers
        bad = self.bad[at] if self.bad[at].any() else np.zeros((1, 1), np.bool_)
        low, high = (self.h[:, at[0], at[1], half] for half in (0, 1))
        whole: Value = Node("shared word", (), 32, low, bad, self.why)
        if (kind == _HALVES).any():
            parts = tuple(Node("shared half", (), 16, part, bad, self.why) for part in (low, high))
            whole = symbolic.lane_mix(kind == _HALVES, symbolic.make("pack16", 32, parts), whole)
        return symbolic.lane_mix(kind == _NUMBER, numbers, whole)


def shared_memory(machine: Machine) -> SharedMemory:
    """The launch's shared memory, empty at first."""
    if machine.shared is None:
        machine.shared = SharedMemory(int(machine.group.max()) + 1)
    return machine.shared  # type: ignore[return-value]


def _address(machine: Machine, instruction: Instruction, position: int) -> NDArray[np.int64]:
    address = machine.read(instruction.operands[position], "u32")
    if isinstance(address, Node):
        raise Unmodelled("an address in shared memory depends on data")
    return np.broadcast_to(address, (machine.waves, machine.lanes)).astype(np.int64)


def _offsets(instruction: Instruction, unit: int) -> list[int]:
    modifiers = instruction.modifiers
    if "offset0" in modifiers or "offset1" in modifiers or "2" in instruction.opcode.split("_")[1]:
        scale = unit * (64 if "st64" in instruction.opcode else 1)
        return [int(str(modifiers.get(name, 0))) * scale for name in ("offset0", "offset1")]
    return [int(str(modifiers.get("offset", 0)))]


def _words(
    instruction: Instruction, address: NDArray[np.int64], on: NDArray[np.bool_]
) -> list[NDArray[np.int64]]:
    size = int(re.findall(r"b(\d+)", instruction.opcode)[-1]) // 8
    places = []
    for offset in _offsets(instruction, size):
        start = address + offset
        if (on & (start % 4 != 0)).any():
            raise Unmodelled("shared memory at an address that is no word's")
        places += [start // 4 + step for step in range(size // 4)]
    return places


def _write(machine: Machine, instruction: Instruction) -> None:
    on = _full_exec(machine)
    if not on.any():
        return
    _, *data = instruction.operands
    registers = [operand.index + step for operand in data for step in range(operand.count)]
    places = _words(instruction, _address(machine, instruction, 0), on)
    for place, register in zip(places, registers, strict=True):
        shared_memory(machine).store(machine.group, place, on, machine.register(data[0].kind, register))


def _read(machine: Machine, instruction: Instruction) -> None:
    on = _full_exec(machine)
    if not on.any():
        return
    destination = instruction.operands[0]
    for step, place in enumerate(_words(instruction, _address(machine, instruction, 1), on)):
        machine.write(destination, shared_memory(machine).load(machine.group, place, on), step)


for _size in ("b32", "b64", "b96", "b128"):
    HANDLERS[f"ds_write_{_size}"] = HANDLERS[f"ds_store_{_size}"] = _write
    HANDLERS[f"ds_read_{_size}"] = HANDLERS[f"ds_load_{_size}"] = _read
for _size in ("b32", "b64"):
    for _middle in ("2", "2st64"):
        HANDLERS[f"ds_write{_middle}_{_size}"] = _write
        HANDLERS[f"ds_read{_middle}_{_size}"] = _read


@handler("ds_write_b16", "ds_write_b16_d16_hi")
def _write_half(machine: Machine, instruction: Instruction) -> None:
    """A half of a word: the other half stays."""
    on = _full_exec(machine)
    if not on.any():
        return
    data = instruction.operands[1]
    start = _address(machine, instruction, 0) + _offsets(instruction, 2)[0]
    word = machine.register(data.kind, data.index)
    half = machine.op("hi16" if "hi" in instruction.opcode else "lo16", word)
    shared = shared_memory(machine)
    for high in (False, True):
        lanes = on & (start % 4 == (2 if high else 0))
        if not lanes.any():
            continue
        shared.grow(int((start[lanes] // 4).max()) + 1)
        at = np.broadcast_to(machine.group, lanes.shape)[lanes], (start // 4)[lanes]
        if (shared.kind[at] == _NUMBER).any() or (shared.kind[at] == _WORD).any():
            raise Unmodelled("half of a word of shared memory is overwritten")
        hashes = np.broadcast_to(symbolic.hash_of(half), (2, *lanes.shape))[:, lanes]
        if not isinstance(half, Node):
            raise Unmodelled("numbers of 16 bits in shared memory")
        shared.h[:, at[0], at[1], int(high)] = hashes
        shared.kind[at] = _HALVES
        shared.bad[at] |= np.broadcast_to(half.bad, lanes.shape)[lanes]
        shared.why |= half.why


@handler("ds_read_u16", "ds_read_u16_d16", "ds_read_u16_d16_hi")
def _read_half(machine: Machine, instruction: Instruction) -> None:
    on = _full_exec(machine)
    if not on.any():
        return
    destination = instruction.operands[0]
    start = _address(machine, instruction, 1) + _offsets(instruction, 2)[0]
    word = shared_memory(machine).load(machine.group, start // 4, on)
    half = symbolic.lane_mix(start % 4 == 2, machine.op("hi16", word), machine.op("lo16", word))
    zero: Value = np.zeros((1, 1), np.uint16)
    if instruction.opcode.endswith("d16"):
        machine.write(
            destination, machine.op("pack16", half, machine.op("hi16", machine.read(destination, "u32")))
        )
    elif instruction.opcode.endswith("hi"):
        machine.write(
            destination, machine.op("pack16", machine.op("lo16", machine.read(destination, "u32")), half)
        )
    else:
        machine.write(destination, machine.op("pack16", half, zero))


@handler("ds_read_b64_tr_b16")
def _read_transposed(machine: Machine, instruction: Instruction) -> None:
    """Sixteen lanes read 16 × 4 halves; lane l of them gets column l of the 4 × 16 matrix those make."""
    on = _full_exec(machine)
    if not on.all():
        raise Unmodelled("a transposing read with inactive lanes")
    start = _address(machine, instruction, 1) + _offsets(instruction, 8)[0]
    if (start % 8 != 0).any():
        raise Unmodelled("a transposing read at an address of this alignment")
    words = [shared_memory(machine).load(machine.group, start // 4 + step, on) for step in range(2)]
    halves = [machine.op(name, word) for word in words for name in ("lo16", "hi16")]
    lane = np.arange(machine.lanes)
    column = lane % 16
    elements: list[Value] = []
    for row in range(4):
        source = lane - column + 4 * row + column // 4
        value: Value = from_lanes(machine, halves[0], source[None])
        for place in range(1, 4):
            moved = from_lanes(machine, halves[place], source[None])
            value = symbolic.lane_mix((column % 4 == place)[None], moved, value)
        elements.append(value)
    for step in range(2):
        word = machine.op("pack16", elements[2 * step], elements[2 * step + 1])
        machine.write(instruction.operands[0], word, step)
