"""What the quick start measures. No torch here: the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("bf16", "fp32")

LAYOUTS = (
    ("TP2", 2, 1, False),
    ("TP4", 4, 1, False),
    ("TP2+SP", 2, 1, True),
    ("CP2", 1, 2, False),
    ("CP4", 1, 4, False),
    ("TP2xCP2+SP", 2, 2, True),
)
"""Name, TP, CP, sequence parallel."""

UPSTREAM_ABSENT = {
    "reference vs actor": "measured once, on the LSE correction: see fp32, one micro-batch",
    "TP2+SP": "torch's norm in Megatron's local spec refuses sequence parallelism",
    "TP2xCP2+SP": "torch's norm in Megatron's local spec refuses sequence parallelism",
}
"""Why a layout has no upstream figure."""


@dataclass(frozen=True)
class Task:
    """One run of one layout."""

    kind: str  # "layout", or "actor": two models in one process
    name: str
    dtype: str
    tp: int = 1
    cp: int = 1
    sp: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def key(self) -> str:
        return f"{self.name}-{self.dtype}".replace("+", "_").replace(" ", "_")


def tasks(mode: str) -> list[Task]:
    """What an engine runs; the unsharded run of each dtype comes first, everything is compared with it.

    Upstream's local spec covers TP alone (torch's norm refuses sequence parallelism, its core attention refuses CP);
    CP is run with TransformerEngine's ring in its place.
    """
    out = [Task("layout", "TP1", dtype) for dtype in DTYPES]
    for dtype in DTYPES:
        if mode == "deterministic":
            out.append(Task("actor", "reference vs actor", dtype))
        out += [
            Task("layout", name, dtype, tp, cp, sp)
            for name, tp, cp, sp in LAYOUTS
            if mode == "deterministic" or (not sp and (cp > 1) == (mode == "ring"))
        ]
    return out
