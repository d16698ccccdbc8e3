"""Run a decoded kernel: every wave of a launch at once, on numbers or on expressions.

State is kept for W waves of L lanes: a vector register is an array [W, L], a scalar one [W, 1]. Integers that
do not depend on loaded data (addresses, masks, loop counters) are concrete in both engines, so branches and
loops over them are followed exactly; what depends on symbolic data is a `Node`. A branch whose condition is
a Node is taken by predication: the guarded code runs with the execution mask as a condition, its results are
selects. Anything outside this model raises `Unmodelled`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit import symbolic
from te_overrides.audit.decode import Instruction, Operand, Program
from te_overrides.audit.isa import SEMANTICS
from te_overrides.audit.isa.spec import BITS, DTYPES
from te_overrides.audit.memory import BUFFER_SHIFT, NumericBuffer, SymbolicBuffer, Unmodelled
from te_overrides.audit.numeric import shift_ulps
from te_overrides.audit.symbolic import Node, Value

__all__ = ["HANDLERS", "Machine", "handler"]

Handler = Callable[["Machine", Instruction], None]
HANDLERS: dict[str, Handler] = {}

_RAW = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_STEPS = 2_000_000
VCC, EXEC = 106, 126
NULL = Operand("name", value="null")


def handler(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a function as the meaning of `opcodes`; a second meaning is an error."""

    def register(function: Handler) -> Handler:
        for opcode in opcodes:
            if opcode in HANDLERS:
                raise ValueError(f"{opcode} has two handlers")
            HANDLERS[opcode] = function
        return function

    return register


class Machine:
    """One launch.

    Args:
        program: the decoded kernel.
        buffers: what addresses point into, by buffer index (`memory.address_of`).
        waves: number of waves W run at once; lanes: lanes L of each that are kept (the rest is inactive).
        seed_ulps: how far approximate instructions are moved from the correctly rounded result (numeric).
    """

    def __init__(
        self,
        program: Program,
        buffers: dict[int, NumericBuffer | SymbolicBuffer],
        waves: int,
        lanes: int,
        seed_ulps: int = 0,
    ) -> None:
        self.program, self.buffers = program, buffers
        self.waves, self.lanes, self.seed_ulps = waves, lanes, seed_ulps
        self.registers: dict[str, dict[int, Value]] = {"v": {}, "a": {}, "s": {}}
        self.masks: dict[int, Value] = {}
        self.scc: Value = np.zeros((1, 1), np.bool_)
        self.exec: Value = np.ones((waves, lanes), np.bool_)
        self.facts: set[Value] = set()
        self.pc = np.zeros(waves, np.int64)
        self.active: NDArray[np.bool_] | None = None
        self._on: NDArray[np.bool_] | None = None
        self.storing: NDArray[np.bool_] = np.zeros((waves, lanes), np.bool_)
        self.scratch: dict[int, Value] = {}
        # Workgroup of each wave [W, 1], and their shared memory (`exchange.SharedMemory`) once there is any.
        self.group = np.zeros((waves, 1), np.int64)
        self.shared: object = None
        # Scalars kept in single lanes of a vector register (V_WRITELANE), by register and lane.
        self.spilled: dict[tuple[int, int], Value] = {}
        # Regions entered by predication: the mask they run under, and what they wrote to scalar registers.
        self.regions: list[tuple[Node, set[int]]] = []
        self.mask_words = program.wave_size // 32

    # -- running ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end of every wave.

        Raises:
            Unmodelled: with the instruction it stopped at.
        """
        instructions = self.program.instructions
        end = len(instructions)
        for _ in range(_STEPS):
            pc = int(self.pc.min())
            if pc >= end:
                return
            at = self.pc == pc
            if at.all():
                if self.active is not None:
                    self.active = self._on = None
                self.pc += 1
            else:
                self.active, self._on = at[:, None], None
                self.pc[at] = pc + 1
            instruction = instructions[pc]
            run = HANDLERS.get(instruction.opcode)
            if run is None:
                raise Unmodelled(f"instruction {instruction.text}")
            try:
                with np.errstate(all="ignore"):
                    run(self, instruction)
            except Unmodelled as stop:
                raise Unmodelled(f"{stop} (at {instruction.text!r})") from stop
        raise Unmodelled(f"no end after {_STEPS} instructions")

    def jump(self, label: str, where: NDArray[np.bool_] | None = None) -> None:
        """Continue at `label`, in the waves of `where` [W] among those running now."""
        target = self.program.labels.get(label)
        if target is None:
            raise Unmodelled(f"label {label} is not in the kernel")
        chosen = np.ones(self.waves, np.bool_) if self.active is None else self.active[:, 0].copy()
        if where is not None:
            chosen &= where
        self.pc[chosen] = target

    def stop(self) -> None:
        chosen = slice(None) if self.active is None else self.active[:, 0]
        self.pc[chosen] = len(self.program.instructions)

    # -- lanes -----------------------------------------------------------------------------------------------

    def lanes_on(self) -> NDArray[np.bool_]:
        """Lanes [W, L] that may be active now."""
        if self._on is None:
            on = np.broadcast_to(symbolic.possible(self.exec), (self.waves, self.lanes))
            self._on = on if self.active is None else on & self.active
        return self._on

    def seen(self, value: Value) -> Value:
        """`value` as the active lanes see it.

        What inactive lanes hold is nobody's business; they get the value of an active one, so that a constant
        written under a mask is a constant.
        """
        if not isinstance(value, Node):
            lanes = self.lanes_on()
            if value.size == 1 or lanes.all() or not lanes.any():
                return value
            wide = np.broadcast_to(value, lanes.shape)
            filled = np.where(lanes, wide, wide.reshape(-1)[lanes.argmax()])
            return filled[:1, :1] if (filled == filled[0, 0]).all() else filled
        if value.op not in ("select", "mix", "and.b1"):
            return value
        return symbolic.assume(value, self.lanes_on(), self.facts)

    def set_exec(self, value: Value) -> None:
        if self.active is not None:
            value = symbolic.lane_mix(self.active, value, self.exec)
        if not isinstance(value, Node):
            value = np.broadcast_to(value, (self.waves, self.lanes))
        self.exec, self._on = value, None
        self.facts = symbolic.conjuncts(value)
        while self.regions and self.regions[-1][0] not in self.facts:
            _, written = self.regions.pop()
            # Where no lane entered the region the hardware may have skipped it, scalar writes included.
            for index in written:
                self.masks.pop(index, None)
                self.registers["s"][index] = symbolic.unknown("scalar register after a branch on data", 32)

    def enter_region(self) -> None:
        if isinstance(self.exec, Node):
            self.regions.append((self.exec, set()))

    # -- operands --------------------------------------------------------------------------------------------

    def register(self, kind: str, index: int) -> Value:
        if kind == "s":
            for base in (index, index - 1) if self.mask_words == 2 else (index,):
                if base in self.masks:
                    return self._mask_word(self.masks[base], index - base)
            if index in (EXEC, EXEC + 1):
                return self._mask_word(self.exec, index - EXEC)
        value = self.registers[kind].get(index)
        if value is None:
            return symbolic.unknown(f"{kind}{index} before anything was written to it", 32)
        return self.seen(value) if kind != "s" else self._scalar(value)

    def _scalar(self, value: Value) -> Value:
        """A scalar as the running waves see it."""
        if self.active is None:
            return value
        if isinstance(value, Node):
            return symbolic.assume(value, self.active, set()) if value.op == "mix" else value
        if value.shape[0] == 1:
            return value
        filled = np.where(self.active, value, value[self.active.argmax()])
        return filled[:1] if (filled == filled[0]).all() else filled

    def _mask_word(self, mask: Value, word: int) -> Value:
        if isinstance(mask, Node):
            # Good for one thing: moved elsewhere with its other half, it is the mask again.
            number = symbolic.unknown("a mask that depends on data, read as a number", 32)
            return Node(f"mask word {word}", (mask,), 32, number.h, number.bad, number.why)
        wide = np.broadcast_to(mask, (self.waves, self.lanes))[:, 32 * word : 32 * word + 32]
        weights = np.uint32(1) << np.arange(wide.shape[1], dtype=np.uint32)
        return (wide * weights).sum(axis=1, dtype=np.uint32)[:, None]

    def _immediate(self, operand: Operand, kind: str) -> NDArray:
        bits = BITS[kind]
        value = operand.value
        if operand.kind == "fimm":
            if kind == "bf16":
                raise Unmodelled("a floating-point constant in a bfloat16 operation")
            # A float constant of an integer operation is the float32 pattern.
            real = kind if kind[0] == "f" else "f32" if bits == 32 else None
            if real is None:
                raise Unmodelled(f"the constant {value} in a {kind} operation")
            raw = np.array(float(value), DTYPES[real]).view(_RAW[bits])  # type: ignore[arg-type]
        else:
            number = int(value)
            inline = -16 <= number <= 64
            if kind == "f64" and not inline:
                number = (number & 0xFFFFFFFF) << 32
            elif bits == 64 and not inline and kind[0] == "u":
                number &= 0xFFFFFFFFFFFFFFFF
            raw = np.array(number & ((1 << bits) - 1), _RAW[bits])
        return raw.reshape(1, 1)

    def read(self, operand: Operand, kind: str, offset: int = 0) -> Value:
        """The raw bits of an operand read as `kind`, its own neg and abs modifiers applied."""
        bits = BITS[kind]
        if operand.kind in ("imm", "fimm"):
            value: Value = self._immediate(operand, kind)
        elif operand == NULL:
            value = np.zeros((1, 1), _RAW[bits])
        elif operand.kind in self.registers:
            index = operand.index + offset
            if kind == "b1":
                return self.read_condition(operand)
            value = self.register(operand.kind, index)
            if bits == 64:
                high = self.register(operand.kind, index + 1)
                value = self.join(value, high)
            elif bits == 16:
                value = self.op("lo16", value)
        elif operand.kind == "off":
            value = np.zeros((1, 1), _RAW[bits])
        else:
            raise Unmodelled(f"operand {operand.value}")
        if operand.abs:
            value = self.op(f"abs.{kind}", value)
        if operand.neg:
            value = self.op(f"neg.{kind}", value)
        return value

    def join(self, low: Value, high: Value) -> Value:
        if isinstance(low, Node) or isinstance(high, Node):
            return symbolic.make("join64", 64, (low, high))
        return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))

    def read_mask(self, operand: Operand) -> Value:
        """A lane mask [W, L]: what a comparison wrote, the execution mask, or the bits of a number.

        All lanes count, active or not; `read_condition` is for instructions that only look at active ones.
        """
        if operand.kind in ("imm",):
            number = int(operand.value)
            bits = [bool(number >> lane & 1) for lane in range(self.lanes)]
            return np.array(bits, np.bool_)[None]
        if operand.kind != "s":
            raise Unmodelled("a lane mask outside scalar registers")
        if operand.index == EXEC:
            return self.exec
        if operand.index in self.masks:
            return self._scalar(self.masks[operand.index])
        bits = np.arange(self.lanes)
        words = [self.register("s", operand.index + word) for word in range(self.mask_words)]
        if any(isinstance(word, Node) for word in words):
            whole = _mask_of(words)
            if whole is not None:
                return whole
            reasons = frozenset[str]().union(*(word.why for word in words if isinstance(word, Node)))
            return symbolic.unknown("; ".join(sorted(reasons)) or "a mask made of data", 1)
        stacked = np.stack([np.broadcast_to(word, (self.waves, 1)) for word in words], axis=-1)[:, 0, :]
        picked = stacked[:, bits // 32] >> (bits % 32).astype(np.uint32)
        return (picked & np.uint32(1)).astype(np.bool_)

    def read_condition(self, operand: Operand) -> Value:
        """A lane mask as the active lanes of a vector instruction see it."""
        return self.seen(self.read_mask(operand))

    def write_mask(self, operand: Operand, value: Value) -> None:
        if operand == NULL:
            return
        if operand.kind != "s":
            raise Unmodelled("a lane mask written outside scalar registers")
        if operand.index == EXEC:
            self.set_exec(value)
            return
        old = self.masks.get(operand.index)
        if self.active is not None:
            value = symbolic.lane_mix(self.active, value, value if old is None else old)
        self._forget(operand.index, self.mask_words)
        self.masks[operand.index] = value
        self._note(operand.index)

    def _forget(self, index: int, count: int) -> None:
        for stale in range(index - self.mask_words + 1, index + count):
            if stale in self.masks:
                mask = self.masks.pop(stale)
                for word in range(self.mask_words):
                    other = stale + word
                    if not index <= other < index + count:
                        self.registers["s"][other] = self._mask_word(mask, word)

    def _note(self, index: int) -> None:
        for _, written in self.regions:
            written.add(index)

    def write(self, operand: Operand, value: Value, offset: int = 0) -> None:
        """Write 16, 32 or 64 raw bits to a register, in active lanes (vector) or running waves (scalar)."""
        bits = symbolic.bits_of(value)
        if bits == 64:
            self._write_word(operand.kind, operand.index + offset, self.op("lo32", value))
            self._write_word(operand.kind, operand.index + offset + 1, self.op("hi32", value))
            return
        if bits == 16:
            if not self.program.arch.startswith("gfx9"):
                raise Unmodelled("a 16-bit result, which keeps the upper half on this architecture")
            value = self.op("pack16", value, np.zeros((1, 1), np.uint16))
        elif bits != 32:
            raise Unmodelled(f"a {bits}-bit result in a register")
        self._write_word(operand.kind, operand.index + offset, value)

    def _write_word(self, kind: str, index: int, value: Value) -> None:
        if kind == "s":
            if index in (EXEC, EXEC + 1):
                raise Unmodelled("half of the execution mask is written")
            self._forget(index, 1)
            if self.active is not None:
                old = self.registers["s"].get(index)
                if old is None:
                    old = symbolic.unknown(f"s{index} before anything was written to it", 32)
                value = symbolic.lane_mix(self.active, value, old)
            self.registers["s"][index] = value
            self._note(index)
            return
        if kind not in ("v", "a"):
            raise Unmodelled("a result that is not a register")
        if kind == "v" and self.spilled:
            self.spilled = {key: kept for key, kept in self.spilled.items() if key[0] != index}
        condition = self.exec
        if self.active is not None:
            condition = symbolic.lane_mix(self.active, condition, np.zeros((1, 1), np.bool_))
        if isinstance(condition, Node) or not condition.all():
            old = self.registers[kind].get(index)
            if old is None:
                old = symbolic.unknown(f"{kind}{index} before anything was written to it", 32)
            value = symbolic.make("select", 32, (condition, value, old))
        self.registers[kind][index] = value

    # -- operations ------------------------------------------------------------------------------------------

    def op(self, name: str, *args: Value) -> Value:
        """Apply a named operation to raw bits: numbers if all sources are, else an expression."""
        if name in _MOVES:
            return self._move(name, args)
        semantic = SEMANTICS.get(name)
        if semantic is None:
            raise Unmodelled(f"operation {name}")
        bits = BITS[semantic.out]
        if name in ("pass.u32", "pass.u64"):
            return args[0]
        if any(isinstance(arg, Node) for arg in args):
            return symbolic.make(name, bits, args)
        sources = [
            _view(arg, DTYPES[kind])  # type: ignore[arg-type]
            for arg, kind in zip(args, semantic.sources, strict=True)
        ]
        result = np.asarray(semantic.fn(*sources))
        if semantic.approximate and self.seed_ulps:
            result = shift_ulps(result, self.seed_ulps)
        return _view(result.astype(DTYPES[semantic.out], copy=False), _RAW[bits])

    def _move(self, name: str, args: tuple[Value, ...]) -> Value:
        bits = _MOVES[name]
        if any(isinstance(arg, Node) for arg in args) or name in ("lo16", "hi16", "lo32", "hi32"):
            return symbolic.make(name, bits, args)
        low, high = args
        return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))  # type: ignore[union-attr]

    def buffer(self, address: NDArray[np.uint64]) -> tuple[int, NumericBuffer | SymbolicBuffer]:
        """The buffer that all of the addresses lie in."""
        kinds = np.unique(address >> np.uint64(BUFFER_SHIFT))
        if kinds.size != 1 or int(kinds[0]) - 1 not in self.buffers:
            raise Unmodelled(
                f"addresses {[hex(int(kind) << BUFFER_SHIFT) for kind in kinds[:4]]} are no buffer's"
            )
        index = int(kinds[0]) - 1
        return index, self.buffers[index]


_MOVES = {"lo16": 16, "hi16": 16, "lo32": 32, "hi32": 32, "pack16": 32}


def _mask_of(words: list[Value]) -> Value | None:
    """The mask that `words` are the parts of, in order, if they are."""
    for position, word in enumerate(words):
        if not isinstance(word, Node) or word.op != f"mask word {position}" or word.args != words[0].args:  # type: ignore[union-attr]
            return None
    return words[0].args[0]  # type: ignore[union-attr]


def _view(array: NDArray, dtype: type) -> NDArray:
    if array.dtype == dtype:
        return array
    return np.ascontiguousarray(array).view(dtype)
