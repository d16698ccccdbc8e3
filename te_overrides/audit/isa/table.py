"""All operations and single-operation opcodes in one place each; a name defined twice is an error."""

from __future__ import annotations

from te_overrides.audit.isa import compare, convert, division, floats, integer
from te_overrides.audit.isa.spec import AluSpec, Semantic

__all__ = ["ALU", "SEMANTICS", "AluSpec", "Semantic"]

SEMANTICS: dict[str, Semantic] = {}
ALU: dict[str, AluSpec] = {}


def _take(into: dict, entries: dict) -> None:
    twice = into.keys() & entries.keys()
    if twice:
        raise ValueError(f"defined twice in te_overrides.audit.isa: {sorted(twice)}")
    into.update(entries)


for _family in (floats, integer, convert):
    _take(ALU, _family.ALU)
for _family in (floats, integer, convert, compare, division):
    _take(SEMANTICS, _family.SEMANTICS)
for _opcode, _spec in ALU.items():
    if _spec.semantic not in SEMANTICS:
        raise ValueError(f"{_opcode} names {_spec.semantic!r}, which is not in SEMANTICS")
