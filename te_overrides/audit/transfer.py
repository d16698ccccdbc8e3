"""Loads and stores: global, flat and buffer addressing, kernel arguments, spills to scratch."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit import symbolic
from te_overrides.audit.decode import Instruction, Operand
from te_overrides.audit.exchange import shared_memory
from te_overrides.audit.machine import HANDLERS, Machine
from te_overrides.audit.memory import BUFFER_SHIFT, SymbolicBuffer, Unmodelled
from te_overrides.audit.symbolic import Node, Value

__all__: list[str] = []

_SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "ushort": 2,
          "sshort": 2, "byte": 1, "short": 2, "short_d16": 2, "short_d16_hi": 2, "byte_d16_hi": 1,
          "b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "b8": 1, "b16": 2,
          "d16_b16": 2, "d16_hi_b16": 2, "ubyte_d16": 1, "ubyte_d16_hi": 1}  # fmt: skip
_M0 = 124
_PLAIN = {"offset", "offen", "nt", "sc0", "sc1", "glc", "slc", "dlc", "off", "scope", "th"}


def _offset(instruction: Instruction) -> int:
    strange = instruction.modifiers.keys() - _PLAIN
    if strange:
        raise Unmodelled(f"modifiers {sorted(strange)}")
    return int(str(instruction.modifiers.get("offset", 0)), 0)


def _number(value: Value, what: str) -> NDArray:
    if isinstance(value, Node):
        why = "; ".join(sorted(value.why)) or "data"
        raise Unmodelled(f"{what} depends on {why}")
    return value


def _global_address(machine: Machine, instruction: Instruction, first: int) -> NDArray[np.uint64]:
    vector, base = instruction.operands[first], instruction.operands[first + 1 :]
    scalar = next((operand for operand in base if operand.kind == "s"), None)
    if scalar is None:
        address = _number(machine.read(vector, "u64"), "an address")
    else:
        low = _number(machine.read(vector, "u32"), "an address").astype(np.uint64)
        address = _number(machine.read(scalar, "u64"), "an address") + low
    return address + np.uint64(_offset(instruction) & 0xFFFFFFFFFFFFFFFF)


def _load(
    machine: Machine, address: NDArray[np.uint64], lanes: NDArray[np.bool_], size: int
) -> list[Value] | None:
    """The words at the lanes' addresses; None if no lane reads."""
    shape = np.broadcast_shapes(address.shape, lanes.shape)
    address, lanes = np.broadcast_to(address, shape), np.broadcast_to(lanes, shape)
    if not lanes.any():
        return None
    index, buffer = machine.buffer(address[lanes])
    offset = address.astype(np.int64) - ((index + 1) << BUFFER_SHIFT)
    return buffer.load(offset, lanes, size)


def _into_registers(
    machine: Machine, destination: Operand, kind: str, words: list[Value] | None, size: int
) -> None:
    if words is None:
        words = [symbolic.unknown("a load no lane takes part in", 32)] * max(1, size // 4)
    if kind in ("sbyte", "i8", "sshort", "i16"):
        width = np.full((1, 1), 8 * size, np.uint32)
        words = [machine.op("bfe.i32", words[0], np.zeros((1, 1), np.uint32), width)]
    elif "d16" in kind:
        low = machine.op("lo16", words[0])
        old = machine.register(destination.kind, destination.index)
        other = machine.op("lo16" if "hi" in kind else "hi16", old)
        words = [machine.op("pack16", *((other, low) if "hi" in kind else (low, other)))]
    for position, word in enumerate(words):
        machine.write(destination, word, position)


def _store(
    machine: Machine, address: NDArray[np.uint64], lanes: NDArray[np.bool_], size: int, words: list[Value]
) -> None:
    shape = (machine.waves, machine.lanes)
    address, lanes = np.broadcast_to(address, shape), np.broadcast_to(lanes, shape)
    if not lanes.any():
        return
    machine.storing |= lanes
    index, buffer = machine.buffer(address[lanes])
    offset = address.astype(np.int64) - ((index + 1) << BUFFER_SHIFT)
    if isinstance(buffer, SymbolicBuffer):
        condition = machine.exec if isinstance(machine.exec, Node) else None
        buffer.store(offset, lanes, size, words, condition)
    else:
        buffer.store(offset, lanes, size, words)


def _stored_words(machine: Machine, operand: Operand, kind: str, size: int) -> list[Value]:
    words = [machine.register(operand.kind, operand.index + word) for word in range(max(1, size // 4))]
    if "hi" in kind:
        high = machine.op("hi16", words[0])
        words = [machine.op("pack16", high, np.zeros((1, 1), np.uint16))]
    return words


def _global_load(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.opcode.split("_load_", 1)[1]
    size = _SIZES[kind]
    words = _load(machine, _global_address(machine, instruction, 1), machine.lanes_on(), size)
    _into_registers(machine, instruction.operands[0], kind, words, size)


def _global_store(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.opcode.split("_store_", 1)[1]
    size = _SIZES[kind]
    vector, data, *rest = instruction.operands
    moved = Instruction(instruction.opcode, "", (vector, *rest), instruction.modifiers)
    words = _stored_words(machine, data, kind, size)
    _store(machine, _global_address(machine, moved, 0), machine.lanes_on(), size, words)


def _load_to_shared(machine: Machine, instruction: Instruction) -> None:
    """Global memory straight to shared memory: lane l writes at M0 + offset + l * size."""
    size = _SIZES[instruction.opcode.rsplit("_", 1)[1]]
    lanes = machine.lanes_on()
    if isinstance(machine.exec, Node) or size % 4:
        raise Unmodelled("a load to shared memory of this form")
    words = _load(machine, _global_address(machine, instruction, 0), lanes, size)
    if words is None:
        return
    base = _number(machine.read(Operand("s", _M0), "u32"), "an address in shared memory").astype(np.int64)
    start = base + _offset(instruction) + np.arange(machine.lanes)[None] * size
    start = np.broadcast_to(start, lanes.shape)
    for step, word in enumerate(words):
        shared_memory(machine).store(machine.group, start // 4 + step, lanes, word)


def _buffer_place(machine: Machine, instruction: Instruction) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Addresses of a raw buffer access and the lanes inside its bounds (outside, loads give 0, stores nothing)."""
    _, vector, resource, scalar = instruction.operands[:4]
    base, size, flags = (
        _number(machine.read(Operand("s", resource.index + step), "u32"), "a buffer descriptor")
        for step in (0, 2, 3)
    )
    high = _number(machine.read(Operand("s", resource.index + 1), "u32"), "a buffer descriptor")
    if (high >> np.uint32(16)).any():
        raise Unmodelled("a structured buffer (stride or swizzle)")
    del flags
    offset = np.full((1, 1), _offset(instruction), np.uint64)
    if "offen" in instruction.modifiers:
        offset = offset + _number(machine.read(vector, "u32"), "a buffer offset").astype(np.uint64)
    elif vector.kind != "off":
        raise Unmodelled("a buffer access with an index")
    width = _SIZES[re.split(r"_(?:load|store)_", instruction.opcode)[1]]
    inside = offset + np.uint64(width) <= size.astype(np.uint64)
    # The scalar offset is outside the bounds check of a raw buffer.
    offset = offset + _number(machine.read(scalar, "u32"), "a buffer offset").astype(np.uint64)
    start = base.astype(np.uint64) | ((high & np.uint32(0xFFFF)).astype(np.uint64) << np.uint64(32))
    return start + offset, inside


def _buffer_load(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.opcode.split("_load_", 1)[1]
    size = _SIZES[kind]
    address, inside = _buffer_place(machine, instruction)
    words = _load(machine, address, machine.lanes_on() & inside, size)
    zero = np.zeros((1, 1), np.uint32)
    if words is None:
        words = [zero] * max(1, size // 4)
    words = [symbolic.lane_mix(inside, word, zero) for word in words]
    _into_registers(machine, instruction.operands[0], kind, words, size)


def _buffer_store(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.opcode.split("_store_", 1)[1]
    size = _SIZES[kind]
    address, inside = _buffer_place(machine, instruction)
    words = _stored_words(machine, instruction.operands[0], kind, size)
    _store(machine, address, machine.lanes_on() & inside, size, words)


def _scalar_load(machine: Machine, instruction: Instruction) -> None:
    destination, base, place = instruction.operands
    count = {"dword": 1, "b32": 1}.get(instruction.opcode[7:]) or int(
        re.sub(r"\D*x?(\d+)$", r"\1", instruction.opcode[7:])
    )
    if instruction.opcode[7:].startswith("b"):
        count = int(instruction.opcode[8:]) // 32
    address = _number(machine.read(base, "u64"), "an address")
    address = address + _number(machine.read(place, "u32"), "an address").astype(np.uint64)
    address = address + np.uint64(_offset(instruction))
    lanes = np.ones((1, 1), np.bool_) if machine.active is None else machine.active
    words = _load(machine, address, lanes, 4 * count)
    for position, word in enumerate(words or ()):
        machine.write(destination, word, position)


def _scratch(machine: Machine, instruction: Instruction) -> None:
    """Spills: each lane's own memory, at an address that is the same in every lane."""
    store = "_store_" in instruction.opcode
    kind = re.split(r"_(?:load|store)_", instruction.opcode)[1]
    size = _SIZES[kind]
    data = instruction.operands[1 if store else 0]
    place = [operand for operand in instruction.operands if operand is not data]
    start = _offset(instruction)
    for operand in place:
        if operand.kind == "s":
            value = _number(machine.read(operand, "u32"), "a scratch address")
            if value.size != 1 and (value != value.flat[0]).any():
                raise Unmodelled("a scratch address that differs between waves")
            start += int(value.flat[0])
        elif operand.kind != "off":
            raise Unmodelled("a scratch address in a vector register")
    if size % 4 or start % 4:
        raise Unmodelled("a spill of less than a word")
    for word in range(size // 4):
        at = start + 4 * word
        if store:
            value = machine.register(data.kind, data.index + word)
            old = machine.scratch.get(at)
            condition = machine.exec
            if machine.active is not None:
                condition = symbolic.lane_mix(machine.active, condition, np.zeros((1, 1), np.bool_))
            if isinstance(condition, Node) or not condition.all():
                old = (
                    symbolic.unknown("scratch before anything was written to it", 32) if old is None else old
                )
                value = symbolic.make("select", 32, (condition, value, old))
            machine.scratch[at] = value
        else:
            if at not in machine.scratch:
                raise Unmodelled("scratch read before anything was written to it")
            found = machine.seen(machine.scratch[at])
            machine.write(data, found, word)


for _kind in ("dword", "dwordx3", "dwordx4"):
    HANDLERS[f"global_load_lds_{_kind}"] = _load_to_shared
for _kind in _SIZES:
    for _space in ("global", "flat"):
        HANDLERS[f"{_space}_load_{_kind}"] = _global_load
        HANDLERS[f"{_space}_store_{_kind}"] = _global_store
    HANDLERS[f"buffer_load_{_kind}"] = _buffer_load
    HANDLERS[f"buffer_store_{_kind}"] = _buffer_store
    HANDLERS[f"scratch_load_{_kind}"] = _scratch
    HANDLERS[f"scratch_store_{_kind}"] = _scratch
for _count in (
    "dword",
    "dwordx2",
    "dwordx4",
    "dwordx8",
    "dwordx16",
    "b32",
    "b64",
    "b96",
    "b128",
    "b256",
    "b512",
):
    HANDLERS[f"s_load_{_count}"] = _scalar_load
