"""Comparisons, reduced to a few: `gt` is `lt` with its sources exchanged, `ge`, `nlt` and the like are negations.

COMPARE maps the condition of `v_cmp_<condition>_<type>` to (operation, exchange, negate).
"""

from __future__ import annotations

import numpy as np

from te_overrides.audit.isa.spec import Semantic

__all__ = ["FLOAT_CONDITIONS", "INTEGER_CONDITIONS", "SEMANTICS"]

FLOAT_CONDITIONS: dict[str, tuple[str, bool, bool]] = {
    "lt": ("lt", False, False), "gt": ("lt", True, False), "le": ("le", False, False), "ge": ("le", True, False),
    "eq": ("eq", False, False), "lg": ("lg", False, False), "o": ("o", False, False), "u": ("o", False, True),
    "nlt": ("lt", False, True), "ngt": ("lt", True, True), "nle": ("le", False, True), "nge": ("le", True, True),
    "neq": ("eq", False, True), "nlg": ("lg", False, True),
}  # fmt: skip
INTEGER_CONDITIONS: dict[str, tuple[str, bool, bool]] = {
    "lt": ("lt", False, False), "gt": ("lt", True, False), "le": ("lt", True, True), "ge": ("lt", False, True),
    "eq": ("eq", False, False), "ne": ("eq", False, True), "lg": ("eq", False, True),
}  # fmt: skip

SEMANTICS: dict[str, Semantic] = {
    "not.b1": Semantic(np.logical_not, "b1", ("b1",)),
    "and.b1": Semantic(np.logical_and, "b1", ("b1", "b1")),
    "or.b1": Semantic(np.logical_or, "b1", ("b1", "b1")),
    "xor.b1": Semantic(np.logical_xor, "b1", ("b1", "b1")),
}
for _kind in ("f16", "f32", "f64"):
    _two = (_kind, _kind)
    SEMANTICS |= {
        f"lt.{_kind}": Semantic(np.less, "b1", _two),
        f"le.{_kind}": Semantic(np.less_equal, "b1", _two),
        f"eq.{_kind}": Semantic(np.equal, "b1", _two),
        f"lg.{_kind}": Semantic(lambda a, b: (a < b) | (a > b), "b1", _two),
        f"o.{_kind}": Semantic(lambda a, b: ~(np.isnan(a) | np.isnan(b)), "b1", _two),
    }
for _kind in ("u16", "i16", "u32", "i32", "u64", "i64"):
    SEMANTICS[f"lt.{_kind}"] = Semantic(np.less, "b1", (_kind, _kind))
    SEMANTICS[f"eq.{_kind}"] = Semantic(np.equal, "b1", (_kind, _kind))
