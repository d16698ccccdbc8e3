"""Expressions of what a kernel stores, as hashes that are equal only where the expressions are.

Every value that depends on loaded data is a `Node`: an operation over nodes and concrete lane vectors. A node
carries, for each lane of each wave, a 128-bit hash of its expression, built from the hashes of its arguments and
so from the *elements* of the inputs the lane loaded, whatever registers and lanes they came through. Two launch
configurations compute the same bits at an output element for every input if the hashes stored there are equal;
NaN counts as one value, since its payload is nobody's contract.

Only identities that hold for every bit pattern (NaN payloads aside) are applied before hashing: commutativity
of +, *, fma and the symmetric comparisons; x + -0 is x; signs, which multiplications carry outwards and comparisons
move to constants; ldexp by a constant as a multiplication; the parts of a register put back together; selects whose
condition is known, or whose outcome does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Node",
    "Value",
    "absorb",
    "assume",
    "bits_of",
    "conjuncts",
    "constant_hash",
    "element_hashes",
    "hash_of",
    "invert",
    "lane_mix",
    "make",
    "possible",
    "tag",
    "unknown",
]

_K1 = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64).reshape(2, 1, 1)
_K2 = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64).reshape(2, 1, 1)
_NOT_BAD = np.zeros((1, 1), np.bool_)


class Node:
    """One operation; `bits` is its width, `h` its lane hashes [2, W, L], `bad` where it rests on the unknown."""

    __slots__ = ("args", "bad", "bits", "h", "op", "why")

    def __init__(
        self,
        op: str,
        args: tuple[Value, ...],
        bits: int,
        h: NDArray[np.uint64],
        bad: NDArray[np.bool_] = _NOT_BAD,
        why: frozenset[str] = frozenset(),
    ) -> None:
        self.op, self.args, self.bits, self.h, self.bad, self.why = op, args, bits, h, bad, why

    def __repr__(self) -> str:
        return f"{self.op}/{self.bits}"


Value = NDArray | Node


@cache
def tag(op: str, bits: int) -> NDArray[np.uint64]:
    """The state [2, 1, 1] a hash of operation `op` starts from."""
    digest = hashlib.blake2b(f"{op}/{bits}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, np.uint64).reshape(2, 1, 1).copy()


def absorb(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The next state of a hash [2, …] after one more word; what came first matters."""
    shape = (2, *(1,) * (max(state.ndim, word.ndim) - 1))
    state = (state ^ word) * _K1.reshape(shape)
    state ^= state >> np.uint64(32)
    state *= _K2.reshape(shape)
    state ^= state >> np.uint64(29)
    return state


def bits_of(value: Value) -> int:
    """Width of a value: 1, 16, 32 or 64."""
    if isinstance(value, Node):
        return value.bits
    return 1 if value.dtype == np.bool_ else value.dtype.itemsize * 8


def constant_hash(value: NDArray) -> NDArray[np.uint64]:
    """Lane hashes [2, W, L] of a concrete vector."""
    return absorb(tag("const", bits_of(value)), value.astype(np.uint64)[None])


def hash_of(value: Value) -> NDArray[np.uint64]:
    return value.h if isinstance(value, Node) else constant_hash(value)


def element_hashes(name: str, count: int) -> NDArray[np.uint64]:
    """Hashes [2, count] of the elements of an input buffer: each is its own unknown quantity."""
    index = np.arange(count, dtype=np.uint64).reshape(1, 1, count)
    return absorb(tag(f"element of {name}", 0), index)[:, 0, :]


def _badness(values: Sequence[Value]) -> tuple[NDArray[np.bool_], frozenset[str]]:
    bad, why = _NOT_BAD, frozenset[str]()
    for value in values:
        if isinstance(value, Node) and value.bad is not _NOT_BAD:
            bad = value.bad if bad is _NOT_BAD else bad | value.bad
            why |= value.why
    return bad, why


def unknown(reason: str, bits: int) -> Node:
    """A value nothing is known of: it compares equal to nothing, wherever it came from."""
    bad = np.ones((1, 1), np.bool_)
    return Node("unknown", (), bits, tag(f"unknown {reason}", bits), bad, frozenset((reason,)))


def _under(condition: NDArray[np.bool_], value: Value, side: int) -> Value:
    """`value` where it is only looked at in the lanes of `condition` (side 1) or outside them (side 2)."""
    while isinstance(value, Node) and value.op == "mix":
        known = value.args[0]
        if known is not condition and not (
            known.shape == condition.shape and np.array_equal(known, condition)
        ):
            break
        value = value.args[side]
    return value


def lane_mix(condition: NDArray[np.bool_], yes: Value, no: Value) -> Value:
    """`yes` in the lanes where the concrete `condition` holds, `no` in the others."""
    if not isinstance(yes, Node) and not isinstance(no, Node):
        return np.where(condition, yes, no)
    if yes is no or condition.all():
        return yes
    if not condition.any():
        return no
    yes, no = _under(condition, yes, 1), _under(condition, no, 2)
    if isinstance(no, Node) and no.op == "mix" and (condition | no.args[0]).all():
        no = no.args[1]
        if not isinstance(yes, Node) and not isinstance(no, Node):
            return np.where(condition, yes, no)
    bad, why = _badness((yes, no))
    if bad is not _NOT_BAD:
        flags = [value.bad if isinstance(value, Node) else _NOT_BAD for value in (yes, no)]
        bad = np.where(condition, flags[0], flags[1])
    hashes = np.where(condition[None], hash_of(yes), hash_of(no))
    return Node("mix", (condition, yes, no), bits_of(yes), hashes, bad, why)


_COMMUTATIVE = frozenset(
    "add.f32 add.f64 add.f16 mul.f32 mul.f64 mul.f16 eq.f32 eq.f64 eq.f16 lg.f32 lg.f64 o.f32 o.f64 o.f16 lg.f16 "
    "add.u32 add.u64 mul.u32 and.u32 or.u32 xor.u32 and.u64 or.u64 xor.u64 eq.u32 eq.u64 eq.u16 and.b1 or.b1 "
    "xor.b1 add.u16 min.f32 max.f32 min.f64 max.f64 min.f16 max.f16 min.u32 max.u32 min.i32 max.i32 "
    "mulhi.u32 mulhi.i32".split()
)
_FMA = frozenset(f"{name}.{kind}" for name in ("fma", "fnma") for kind in ("f16", "f32", "f64"))


def _hash(op: str, bits: int, args: Sequence[Value]) -> NDArray[np.uint64]:
    hashes = [hash_of(arg) for arg in args]
    if (op in _COMMUTATIVE and len(args) == 2) or op in _FMA:
        # Ordered lane by lane on the first word; the second follows it.
        left, right = hashes[0], hashes[1]
        swap = (left[0] > right[0])[None]
        hashes[0], hashes[1] = np.where(swap, right, left), np.where(swap, left, right)
    state = tag(op, bits)
    for word in hashes:
        state = absorb(state, word)
    return state


def is_constant(value: Value, number: int) -> bool:
    return not isinstance(value, Node) and bool((value == value.dtype.type(number)).all())


def _is(value: Value, op: str) -> bool:
    return isinstance(value, Node) and value.op == op


def _const(number: int, bits: int) -> NDArray:
    dtype = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    return np.full((1, 1), number, dtype)


def _half(value: Value, high: bool) -> Value:
    if not isinstance(value, Node):
        return (value >> np.uint32(16) if high else value & np.uint32(0xFFFF)).astype(np.uint16)
    if value.op == "pack16":
        return value.args[1 if high else 0]
    if value.op in ("select", "mix"):
        return _select(value.args[0], *(_half(side, high) for side in value.args[1:]))
    return _plain("hi16" if high else "lo16", 16, (value,))


def _word(value: Value, high: bool) -> Value:
    if not isinstance(value, Node):
        return (value >> np.uint64(32) if high else value & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    if value.op == "join64":
        return value.args[1 if high else 0]
    return _plain("hi32" if high else "lo32", 32, (value,))


def _plain(op: str, bits: int, args: tuple[Value, ...]) -> Node:
    bad, why = _badness(args)
    return Node(op, args, bits, _hash(op, bits, args), bad, why)


def _join(op: str, bits: int, low: Value, high: Value) -> Value:
    parts = ("lo32", "hi32") if op == "join64" else ("lo16", "hi16")
    if _is(low, parts[0]) and _is(high, parts[1]) and low.args[0] is high.args[0]:  # type: ignore[union-attr]
        return low.args[0]  # type: ignore[union-attr]
    if op == "join64" and _is(low, "lo32") and isinstance(high, Node) and high.op in ("neg.f32", "abs.f32"):
        # The sign of a float64 sits in its upper word.
        if _is(high.args[0], "hi32") and high.args[0].args[0] is low.args[0]:  # type: ignore[union-attr]
            return make(f"{high.op[:3]}.f64", 64, (low.args[0],))  # type: ignore[union-attr]
    if isinstance(low, Node) and isinstance(high, Node) and low.op == high.op == "select":
        if low.args[0] is high.args[0]:
            sides = [_join(op, bits, *pair) for pair in zip(low.args[1:], high.args[1:], strict=True)]
            return _select(low.args[0], *sides)
    if not isinstance(low, Node) and not isinstance(high, Node):
        dtype = np.uint64 if op == "join64" else np.uint32
        return low.astype(dtype) | (high.astype(dtype) << dtype(bits // 2))
    return _plain(op, bits, (low, high))


def _equal_words(args: tuple[Value, ...]) -> Value | None:
    """64-bit equality of values whose upper words are known to be equal, as one of the lower words."""
    for value, other in (args, args[::-1]):
        if _is(value, "join64") and not isinstance(other, Node) and not isinstance(_word(value, True), Node):
            if np.array_equal(_word(value, True), _word(other, True)):
                return make("eq.u32", 1, (_word(value, False), _word(other, False)))
    return None


def _permuted(args: tuple[Value, ...]) -> Value | None:
    """V_PERM_B32 with a constant selector that moves whole halves."""
    first, second, selector = args
    if isinstance(selector, Node) or (selector != selector.flat[0]).any():
        return None
    number = int(selector.flat[0])
    halves: list[Value] = []
    for pair in (number & 0xFFFF, number >> 16):
        low, high = pair & 0xFF, pair >> 8
        if low == high == 0x0C:
            halves.append(_const(0, 16))
        elif low % 2 == 0 and high == low + 1 and high < 8:
            halves.append(_half(second if low < 4 else first, low in (2, 6)))
        else:
            return None
    return _join("pack16", 32, *halves)


_ONE = {"f16": 0x3C00, "f32": 0x3F800000, "f64": 0x3FF0000000000000}
_SIGN = {"f16": 0x8000, "f32": 0x80000000, "f64": 0x8000000000000000}


def _bitwise_u32(op: str, args: tuple[Value, ...]) -> Value | None:
    """Bit operations that only move halves or touch the sign, by the names those have."""
    for value, other in (args, args[::-1]):
        if op == "and.u32":
            if is_constant(other, 0x7FFFFFFF):
                return make("abs.f32", 32, (value,))
            if is_constant(other, 0xFFFF):
                return _join("pack16", 32, _half(value, False), _const(0, 16))
            if is_constant(other, 0xFFFF0000):
                return _join("pack16", 32, _const(0, 16), _half(value, True))
        elif op == "xor.u32" and is_constant(other, 0x80000000):
            return make("neg.f32", 32, (value,))
        elif op == "or.u32":
            if is_constant(other, 0):
                return value
            if (
                _is(value, "pack16")
                and is_constant(_half(value, False), 0)
                and is_constant(_half(other, True), 0)
            ):
                return _join("pack16", 32, _half(other, False), _half(value, True))
    return None


def _select(condition: Value, yes: Value, no: Value) -> Value:
    if not isinstance(condition, Node):
        return lane_mix(condition, yes, no)
    if condition.op == "not.b1":
        return _select(condition.args[0], no, yes)
    if condition.op == "mix":
        known, there, elsewhere = condition.args
        return lane_mix(
            known,
            _select(there, _under(known, yes, 1), _under(known, no, 1)),
            _select(elsewhere, _under(known, yes, 2), _under(known, no, 2)),
        )
    if yes is no:
        return yes
    if _is(yes, "select") and yes.args[0] is condition:  # type: ignore[union-attr]
        yes = yes.args[1]  # type: ignore[union-attr]
    if _is(no, "select") and no.args[0] is condition:  # type: ignore[union-attr]
        no = no.args[2]  # type: ignore[union-attr]
    chosen = _plain("select", bits_of(yes), (condition, yes, no))
    return _other_of_two(condition, yes, no, chosen) if condition.op == "eq.u32" else chosen


def _other_of_two(condition: Node, yes: Value, no: Value, chosen: Value) -> Value:
    """``p == q ? yes : no`` where it is known lane by lane: `yes` where p is q, `no` where yes and no are p and q.

    Triton asks like that, on gfx950, which register holds the neighbour's value after two lanes were swapped. In the
    second case both are one number if they are equal.
    """
    p, q = condition.args
    shape = np.broadcast_shapes(*(hash_of(value).shape for value in (p, q, yes, no)))
    hashes = [np.broadcast_to(hash_of(value), shape) for value in (p, q, yes, no)]
    same = np.broadcast_to(_is_one_value(p, q), shape[1:])
    either = ((hashes[2] == hashes[0]) & (hashes[3] == hashes[1])).all(0)
    either = either | ((hashes[2] == hashes[1]) & (hashes[3] == hashes[0])).all(0)
    return lane_mix(same, yes, lane_mix(either, no, chosen))


def _is_one_value(value: Value, other: Value) -> NDArray[np.bool_]:
    """Lanes [W, L] in which both are the very same value; equal expressions may be NaNs of different payloads."""
    if value is other:
        return np.ones((1, 1), np.bool_)
    if _is(value, "mix"):
        known, there, elsewhere = value.args  # type: ignore[union-attr]
        return np.where(known, _is_one_value(there, other), _is_one_value(elsewhere, other))
    if _is(other, "mix"):
        return _is_one_value(other, value)
    return np.zeros((1, 1), np.bool_)


def invert(value: Value) -> Value:
    """Logical not, concrete or symbolic."""
    return make("not.b1", 1, (value,)) if isinstance(value, Node) else ~value


def _logical(op: str, left: Value, right: Value) -> Value:
    if isinstance(left, Node) or isinstance(right, Node):
        return make(op, 1, (left, right))
    return {"and.b1": np.logical_and, "or.b1": np.logical_or, "xor.b1": np.logical_xor}[op](left, right)


def conjuncts(value: Value) -> set[Value]:
    """Nodes that hold wherever `value` does."""
    if not isinstance(value, Node):
        return set()
    found = {value}
    if value.op == "and.b1":
        for arg in value.args:
            found |= conjuncts(arg)
    elif value.op == "mix" and is_constant(value.args[2], 0):
        found |= conjuncts(value.args[1])
    return found


def possible(value: Value) -> NDArray[np.bool_]:
    """Lanes in which a condition may hold."""
    if not isinstance(value, Node):
        return value
    if value.op == "mix":
        return np.where(value.args[0], possible(value.args[1]), possible(value.args[2]))
    if value.op == "and.b1":
        return possible(value.args[0]) & possible(value.args[1])
    return np.ones((1, 1), np.bool_)


def assume(value: Value, lanes: NDArray[np.bool_], facts: set[Value]) -> Value:
    """`value` as seen in `lanes` only, in which all of `facts` hold."""
    while isinstance(value, Node):
        if value.op == "select" and value.args[0] in facts:
            value = value.args[1]
        elif value.op == "select" and invert_known(value.args[0], facts):
            value = value.args[2]
        elif value.op == "and.b1" and value.args[0] in facts:
            value = value.args[1]
        elif value.op == "and.b1" and value.args[1] in facts:
            value = value.args[0]
        elif value.op == "mix":
            return _assume_mix(value, lanes, facts)
        else:
            break
    return value


def _assume_mix(value: Node, lanes: NDArray[np.bool_], facts: set[Value]) -> Value:
    condition, yes, no = value.args
    inside, outside = lanes & condition, lanes & ~condition
    if not outside.any():
        return assume(yes, lanes, facts)
    if not inside.any():
        return assume(no, lanes, facts)
    new_yes, new_no = assume(yes, inside, facts), assume(no, outside, facts)
    return value if new_yes is yes and new_no is no else lane_mix(condition, new_yes, new_no)


def invert_known(value: Value, facts: set[Value]) -> bool:
    return any(isinstance(fact, Node) and fact.op == "not.b1" and fact.args[0] is value for fact in facts)


def _boolean(op: str, args: tuple[Value, ...]) -> Value | None:
    if op == "not.b1":
        if _is(args[0], "not.b1"):
            return args[0].args[0]  # type: ignore[union-attr]
        if _is(args[0], "mix"):
            known, yes, no = args[0].args  # type: ignore[union-attr]
            return lane_mix(known, invert(yes), invert(no))
        return None
    for value, other in (args, args[::-1]):
        if isinstance(other, Node):
            if other.op == "mix":
                known, yes, no = other.args
                return lane_mix(
                    known,
                    _logical(op, _under(known, value, 1), yes),
                    _logical(op, _under(known, value, 2), no),
                )
            if other.op == "not.b1" and other.args[0] is value:
                return _const(op != "and.b1", 1)
            continue
        if op == "and.b1":
            return lane_mix(other, value, _const(0, 1))
        if op == "or.b1":
            return lane_mix(other, _const(1, 1), value)
        if op == "xor.b1":
            return lane_mix(other, invert(value), value)
    if args[0] is args[1] and op in ("and.b1", "or.b1"):
        return args[0]
    return None


def make(op: str, bits: int, args: tuple[Value, ...]) -> Value:
    """The node of `op` over `args`, after the identities named in the module's docstring."""
    kind = op.rpartition(".")[2]
    if op == "select":
        return _select(*args)
    if op in ("lo16", "hi16"):
        return _half(args[0], op == "hi16")
    if op in ("lo32", "hi32"):
        return _word(args[0], op == "hi32")
    if op in ("join64", "pack16"):
        return _join(op, bits, *args)
    if kind == "b1":
        found = _boolean(op, args)
        if found is not None:
            return found
    elif op in ("and.u32", "or.u32", "xor.u32"):
        found = _bitwise_u32(op, args)
        if found is not None:
            return found
    elif op == "shl.u32" and is_constant(args[1], 16):
        return _join("pack16", 32, _const(0, 16), _half(args[0], False))
    elif op == "shr.u32" and is_constant(args[1], 16):
        return _join("pack16", 32, _half(args[0], True), _const(0, 16))
    elif op.startswith("neg.") and _is(args[0], op):
        return args[0].args[0]  # type: ignore[union-attr]
    elif op.startswith("abs.") and isinstance(args[0], Node) and args[0].op in (op, f"neg.{kind}"):
        return make(op, bits, args[0].args)
    elif op in ("cvt.f64.f32", "cvt.f32.f64", "cvt.f32.f16", "cvt.f16.f32") and _is(args[0], f"neg.{kind}"):
        # Conversions round to nearest even, symmetrically.
        target = op.split(".")[1]
        return make(f"neg.{target}", bits, (make(op, bits, args[0].args),))  # type: ignore[union-attr]
    elif kind in _SIGN and op.startswith(("lt.", "le.", "eq.", "lg.", "o.")):
        return _comparison(op, kind, args)
    elif op == "eq.u64":
        found = _equal_words(args)
        if found is not None:
            return found
    elif op == "bfe.u32" and not any(isinstance(arg, Node) for arg in args[1:]):
        field = (np.uint32(1) << (args[2] & np.uint32(31))) - np.uint32(1)
        shifted = args[0] if is_constant(args[1], 0) else make("shr.u32", 32, args[:2])
        return make("and.u32", 32, (shifted, field))
    elif op == "perm.u32":
        found = _permuted(args)
        if found is not None:
            return found
    elif op == "alignbit.u32" and is_constant(args[2], 16):
        return _join("pack16", 32, _half(args[1], True), _half(args[0], False))
    elif op in ("ldexp.f32", "ldexp.f64"):
        power = _power_of_two(kind, args[1])
        if power is not None:
            return make(f"mul.{kind}", bits, (args[0], power))
    elif op.startswith(("mul.f", "fma.f")):
        return _product(op, kind, bits, args)
    elif op in ("add.f32", "add.f64"):
        return _sum(op, kind, bits, args)
    return _plain(op, bits, args)


def _sum(op: str, kind: str, bits: int, args: tuple[Value, ...]) -> Value:
    """x + -0 is x, in every lane where one of them is that constant."""
    left, right = args
    zero = constant_hash(_const(_SIGN[kind], bits))
    only_left, only_right = ((hash_of(value) == zero).all(0) for value in (right, left))
    return lane_mix(only_left, left, lane_mix(only_right, right, _plain(op, bits, args)))


def _comparison(op: str, kind: str, args: tuple[Value, ...]) -> Value:
    """Comparisons with signs moved to constants: -a < c is -c < a. Order of two negations is exchanged."""
    negative = f"neg.{kind}"
    if op.startswith("o."):
        bare = []
        for arg in args:
            while _is(arg, negative) or _is(arg, f"abs.{kind}"):
                arg = arg.args[0]  # type: ignore[union-attr]
            bare.append(arg)
        return _plain(op, 1, tuple(bare))
    negated = [_is(arg, negative) for arg in args]
    movable = [known or not isinstance(arg, Node) for known, arg in zip(negated, args, strict=True)]
    if any(negated) and all(movable):
        flip = _SIGN[kind]
        turned = tuple(
            arg.args[0] if isinstance(arg, Node) else arg ^ arg.dtype.type(flip)  # type: ignore[misc]
            for arg in args
        )
        args = turned[::-1] if op.startswith("l") and not op.startswith("lg") else turned
    return _plain(op, 1, args)


def _power_of_two(kind: str, exponent: Value) -> Value | None:
    """2**exponent if that is a normal number in every lane: multiplying by it rounds once, as ldexp does."""
    if isinstance(exponent, Node):
        if exponent.op not in ("select", "mix"):
            return None
        condition, *sides = exponent.args
        powers = [_power_of_two(kind, side) for side in sides]
        if powers[0] is None or powers[1] is None:
            return None
        return _select(condition, powers[0], powers[1])
    bias, shift, dtype = (127, 23, np.uint32) if kind == "f32" else (1023, 52, np.uint64)
    number = exponent.view(np.int32)
    if ((number <= -bias) | (number > bias)).any():
        return None
    return (number + bias).astype(dtype) << dtype(shift)


def _product(op: str, kind: str, bits: int, args: tuple[Value, ...]) -> Value:
    """Pull the signs out of a product: exact in round-to-nearest, also for zeros and infinities."""
    negative, flip = f"neg.{kind}", _SIGN[kind]
    if op.startswith("fma") and is_constant(args[2], flip):
        # Adding -0 changes nothing, the sign of a zero included: this is how a multiply-add multiplies.
        return make(f"mul.{kind}", bits, args[:2])
    if op.startswith("fma") and is_constant(args[1], _ONE[kind]):
        return make(f"add.{kind}", bits, (args[0], args[2]))
    factors, odd = [], False
    for factor in args[:2]:
        if _is(factor, negative):
            factor, odd = factor.args[0], not odd  # type: ignore[union-attr]
        elif not isinstance(factor, Node) and bool((factor & factor.dtype.type(flip) != 0).all()):
            factor, odd = factor ^ factor.dtype.type(flip), not odd
        factors.append(factor)
    if op.startswith("mul"):
        node = _plain(op, bits, tuple(factors))
        return make(negative, bits, (node,)) if odd else node
    # fma(-a, b, c): one spelling for either factor negated.
    return _plain(f"fnma.{kind}" if odd else op, bits, (*factors, args[2]))
