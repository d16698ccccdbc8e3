"""The memory a kernel sees: one buffer per pointer argument, far apart, holding numbers or expressions.

Both kinds answer in 32-bit words, which is what registers hold. A symbolic buffer keeps one expression hash per
element; a word of a smaller type packs two of them, a float64 element spans two words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit.symbolic import Node, Value, element_hashes, hash_of, make

__all__ = ["BUFFER_SHIFT", "NumericBuffer", "SymbolicBuffer", "Unmodelled", "address_of"]

BUFFER_SHIFT = 36


class Unmodelled(Exception):
    """The tool does not know what this code computes; the launch is reported as unknown, never as equal."""


def address_of(index: int) -> int:
    """Address of the first byte of buffer `index`."""
    return (index + 1) << BUFFER_SHIFT


def _halves(value: Value, bits: int) -> tuple[Value, Value]:
    if isinstance(value, Node):
        name = "32" if bits == 64 else "16"
        return make(f"lo{name}", bits // 2, (value,)), make(f"hi{name}", bits // 2, (value,))
    dtype = np.uint32 if bits == 64 else np.uint16
    shift = value.dtype.type(bits // 2)
    return value.astype(dtype), (value >> shift).astype(dtype)


class NumericBuffer:
    """Bytes. Reading or writing outside raises `Unmodelled`: a launch that does so is not understood."""

    def __init__(self, name: str, data: NDArray) -> None:
        self.name, self.dtype, self.shape = name, data.dtype, data.shape
        self.bytes = np.ascontiguousarray(data).view(np.uint8).reshape(-1).copy()
        self.written = np.zeros(self.bytes.shape, np.bool_)

    def array(self) -> NDArray:
        """The contents as first given: dtype and shape."""
        return self.bytes.view(self.dtype).reshape(self.shape)

    def _check(self, offset: NDArray, lanes: NDArray[np.bool_], size: int) -> None:
        outside = lanes & ((offset < 0) | (offset + size > self.bytes.size))
        if outside.any():
            where = int(np.broadcast_to(offset, outside.shape)[outside][0])
            raise Unmodelled(f"access at byte {where} of {self.name}, which has {self.bytes.size}")

    def load(self, offset: NDArray, lanes: NDArray[np.bool_], size: int) -> list[Value]:
        """`size` bytes at each lane's byte `offset`, as words (one zero-extended word below four bytes)."""
        self._check(offset, lanes, size)
        base = np.where(lanes, offset, 0)
        words: list[Value] = []
        for start in range(0, size, 4):
            word = np.zeros(base.shape, np.uint32)
            for byte in range(start, min(start + 4, size)):
                word |= self.bytes[base + byte].astype(np.uint32) << np.uint32(8 * (byte - start))
            words.append(word)
        return words

    def store(self, offset: NDArray, lanes: NDArray[np.bool_], size: int, words: list[Value]) -> None:
        self._check(offset, lanes, size)
        for byte in range(size):
            word = words[byte // 4]
            if isinstance(word, Node):
                raise Unmodelled(f"an expression is stored to {self.name}, which holds numbers")
            value = (word >> np.uint32(8 * (byte % 4))).astype(np.uint8)
            where = np.broadcast_to(offset, lanes.shape)[lanes] + byte
            self.bytes[where] = np.broadcast_to(value, lanes.shape)[lanes]
            self.written[where] = True


class SymbolicBuffer:
    """One expression hash per element of `itemsize` bytes; `bad` marks what rests on something unknown."""

    def __init__(self, name: str, count: int, itemsize: int) -> None:
        self.name, self.count, self.itemsize = name, count, itemsize
        self.h = element_hashes(name, count)
        self.bad = np.zeros(count, np.bool_)
        self.written = np.zeros(count, np.bool_)
        self.why: frozenset[str] = frozenset()

    def _elements(self, offset: NDArray, lanes: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
        if (lanes & (offset % self.itemsize != 0)).any() or size % self.itemsize:
            raise Unmodelled(
                f"{size} bytes at unaligned offsets of {self.name} ({self.itemsize}-byte elements)"
            )
        index = np.where(lanes, offset // self.itemsize, 0)
        if ((index < 0) | (index + size // self.itemsize > self.count)).any():
            raise Unmodelled(f"access outside {self.name}, which has {self.count} elements")
        return index

    def _element(self, index: NDArray[np.int64]) -> Node:
        bits = self.itemsize * 8
        bad = self.bad[index]
        if bad.any():
            return Node("load", (), bits, self.h[:, index], bad, self.why)
        return Node("load", (), bits, self.h[:, index])

    def load(self, offset: NDArray, lanes: NDArray[np.bool_], size: int) -> list[Value]:
        index = self._elements(offset, lanes, size)
        count = size // self.itemsize
        if any((self.written[index + step] & lanes).any() for step in range(count)):
            raise Unmodelled(f"{self.name} is read where this launch has written")
        elements = [self._element(index + step) for step in range(count)]
        if self.itemsize == 4:
            return list(elements)
        if self.itemsize == 8:
            return [half for element in elements for half in _halves(element, 64)]
        if self.itemsize == 2:
            zero = np.zeros((1, 1), np.uint16)
            padded: list[Value] = [*elements, *([zero] if count % 2 else [])]
            return [make("pack16", 32, pair) for pair in zip(padded[::2], padded[1::2], strict=True)]
        if count == 1:
            return [make("zext8", 32, (elements[0],))]
        raise Unmodelled(f"{count} one-byte elements in one load of {self.name}")

    def store(
        self,
        offset: NDArray,
        lanes: NDArray[np.bool_],
        size: int,
        words: list[Value],
        condition: Node | None = None,
    ) -> None:
        index = self._elements(offset, lanes, size)
        values: list[Value]
        if self.itemsize == 4:
            values = words
        elif self.itemsize == 8:
            values = [make("join64", 64, pair) for pair in zip(words[::2], words[1::2], strict=True)]
        elif self.itemsize == 2:
            values = [half for word in words for half in _halves(word, 32)][: size // 2]
        elif size == 1:
            values = [make("low8", 8, (words[0],))]
        else:
            raise Unmodelled(f"{size} one-byte elements in one store to {self.name}")
        for step, value in enumerate(values):
            if condition is not None:
                value = make("select", self.itemsize * 8, (condition, value, self._element(index + step)))
            self._put(index + step, lanes, value)

    def _put(self, index: NDArray[np.int64], lanes: NDArray[np.bool_], value: Value) -> None:
        where = np.broadcast_to(index, lanes.shape)[lanes]
        hashes = np.broadcast_to(hash_of(value), (2, *lanes.shape))
        self.h[:, where] = hashes[:, lanes]
        self.written[where] = True
        if isinstance(value, Node):
            self.bad[where] = np.broadcast_to(value.bad, lanes.shape)[lanes]
            if value.bad.any():
                self.why |= value.why
        else:
            self.bad[where] = False
