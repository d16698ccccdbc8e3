"""The two kinds of table entries, and the types values have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["BITS", "DTYPES", "AluSpec", "Semantic"]

DTYPES: dict[str, type] = {
    "b1": np.bool_,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
# bfloat16 has no numpy type: its operations take and give the raw 16 bits.
BITS = {name: 1 if name == "b1" else int(name[1:]) for name in DTYPES} | {"bf16": 16}
DTYPES["bf16"] = np.uint16


@dataclass(frozen=True)
class Semantic:
    """An operation: numpy function over the source types, result of type `out`.

    `approximate` marks hardware functions whose last bits are not specified (`v_rcp_f32`, …): opaque to the
    symbolic engine, correctly rounded and then moved by the chosen number of ULPs in the numeric one.
    """

    fn: Callable
    out: str
    sources: tuple[str, ...]
    approximate: bool = False


@dataclass(frozen=True)
class AluSpec:
    """An opcode: its operation and, for each source of the operation, the position among its operands.

    Position 0 is the destination (read by the accumulating forms). `negate` lists the sources of the operation
    whose sign turns: a - b is a + (-b) in every bit except a NaN's sign.
    """

    semantic: str
    order: tuple[int, ...]
    negate: tuple[int, ...] = ()
