"""Matrix instructions, symbolically: what meets in one MFMA, in which position, on top of which accumulator.

How the hardware adds inside one instruction is not documented, so its result is a function of the opcode, the
accumulator and the products *by K position*. Two launches are equal if their chains are. The numeric engine
computes it only where no order of addition could round: integers below 2^24, which is what layouts are checked
with. Lanes hold A[i, k], B[k, j] and D[i, j] as the CDNA3 and CDNA4 manuals lay them out for one block.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit import symbolic
from te_overrides.audit.decode import Instruction, Operand
from te_overrides.audit.machine import HANDLERS, Machine
from te_overrides.audit.memory import Unmodelled
from te_overrides.audit.symbolic import Node, Value

__all__: list[str] = []

_OPCODE = re.compile(r"v_mfma_f32_(16x16x16|16x16x32|32x32x8|32x32x16)_?(bf16|f16)(_1k)?")
SHAPES = ("16x16x16", "16x16x32", "32x32x8", "32x32x16")


def _wide(machine: Machine, value: Value) -> NDArray[np.uint64]:
    """Hashes [2, W, L]."""
    return np.broadcast_to(symbolic.hash_of(value), (2, machine.waves, machine.lanes))


def _factors(
    machine: Machine, operand: Operand, rows: int, depth: int
) -> tuple[NDArray[np.uint64], list[Value]]:
    """Hashes [2, W, rows, depth] of A (or of B transposed): lane i + rows * g holds depth / groups indices."""
    each = depth * rows // machine.lanes
    if operand.count * 2 != each:
        raise Unmodelled(f"a matrix operand of {operand.count} registers for {each} elements a lane")
    values: list[Value] = []
    for register in range(operand.index, operand.index + operand.count):
        word = machine.register(operand.kind, register)
        values += [machine.op("lo16", word), machine.op("hi16", word)]
    stacked = np.stack([_wide(machine, value) for value in values], axis=-1)
    groups = machine.lanes // rows
    shaped = stacked.reshape(2, machine.waves, groups, rows, each)
    return shaped.transpose(0, 1, 3, 2, 4).reshape(2, machine.waves, rows, depth), values


def _places(rows: int, registers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of D in each lane's registers, [64, registers]."""
    lane, register = np.arange(64)[:, None], np.arange(registers)[None]
    row = (register // 4) * (4 * 64 // rows) + (lane // rows) * 4 + register % 4
    return row, np.broadcast_to(lane % rows, row.shape)


def _mfma(machine: Machine, instruction: Instruction) -> None:
    match = _OPCODE.fullmatch(instruction.opcode)
    if match is None or instruction.modifiers:
        raise Unmodelled("a matrix instruction of this form")
    if isinstance(machine.exec, Node) or not machine.lanes_on().all() or machine.lanes != 64:
        raise Unmodelled("a matrix instruction with inactive lanes")
    rows, _, depth = (int(part) for part in match[1].split("x"))
    destination, a, b, c = instruction.operands
    registers = rows * rows // 64
    left, left_values = _factors(machine, a, rows, depth)
    right, right_values = _factors(machine, b, rows, depth)
    if c.kind in ("v", "a"):
        sums: list[Value] = [machine.register(c.kind, c.index + step) for step in range(registers)]
    else:
        sums = [machine.read(c, "f32")] * registers
    if not any(isinstance(value, Node) for value in (*left_values, *right_values, *sums)):
        _on_integers(machine, instruction, (rows, depth), left_values, right_values, sums)
        return
    row, column = _places(rows, registers)
    # [2, W, 64, registers], then a chain over K; multiplication commutes, positions do not.
    state = np.stack([_wide(machine, value) for value in sums], axis=-1)
    state = symbolic.absorb(symbolic.tag(f"mfma {match[1]} {match[2]}", 32)[..., None], state)
    for k in range(depth):
        first, second = left[:, :, row, k], right[:, :, column, k]
        swap = (first[0] > second[0])[None]
        state = symbolic.absorb(state, np.where(swap, second, first))
        state = symbolic.absorb(state, np.where(swap, first, second))
    involved = [value for value in (*left_values, *right_values, *sums) if isinstance(value, Node)]
    bad = any(bool(value.bad.any()) for value in involved)
    why = frozenset[str]().union(*(value.why for value in involved))
    for step in range(registers):
        flags = np.full((1, 1), bad)
        machine.write(destination, Node("mfma", (), 32, state[..., step], flags, why), step)


def _on_integers(
    machine: Machine,
    instruction: Instruction,
    shape: tuple[int, int],
    left: list[Value],
    right: list[Value],
    sums: list[Value],
) -> None:
    rows, depth = shape
    half = np.float16 if "bf16" not in instruction.opcode else None

    def matrix(values: list[Value]) -> NDArray[np.float64]:
        raw = np.stack([np.broadcast_to(value, (machine.waves, 64)) for value in values], axis=-1)
        real = raw.view(half) if half else (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        shaped = real.astype(np.float64).reshape(machine.waves, 64 // rows, rows, len(values))
        return shaped.transpose(0, 2, 1, 3).reshape(machine.waves, rows, depth)

    a, b = matrix(left), matrix(right)
    row, column = _places(rows, len(sums))
    words = [np.broadcast_to(value, (machine.waves, 64)) for value in sums]
    c = np.stack(words, axis=-1).view(np.float32).astype(np.float64)
    size = np.abs(a) @ np.abs(b).transpose(0, 2, 1)
    whole = all(bool((part == np.rint(part)).all()) for part in (a, b, c))
    if not whole or size.max() + np.abs(c).max() >= 2**24:
        raise Unmodelled("a matrix instruction whose sum may be rounded, in an order nobody documents")
    result = (c + (a @ b.transpose(0, 2, 1))[:, row, column]).astype(np.float32)
    for step in range(len(sums)):
        machine.write(instruction.operands[0], np.ascontiguousarray(result[..., step]).view(np.uint32), step)


for _shape in SHAPES:
    for _kind in ("bf16", "f16"):
        for _name in (
            f"v_mfma_f32_{_shape}_{_kind}",
            f"v_mfma_f32_{_shape}{_kind}_1k",
            f"v_mfma_f32_{_shape}{_kind}",
        ):
            HANDLERS[_name] = _mfma
