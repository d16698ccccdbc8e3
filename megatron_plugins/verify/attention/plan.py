"""What is compared: rows, each with the ranks that it takes and the results that it has."""

from __future__ import annotations

from dataclasses import dataclass

RESULTS = ("out", "LSE", "dQ", "dK", "dV")
FORWARD = ("out", "LSE")


@dataclass(frozen=True)
class Shape:
    """Sizes of the batch; `length` is a multiple of 16 zigzag chunks, so that every degree cuts it.

    Attributes:
        repeats: how often the row `repeats` computes again.
    """

    length: int
    batch: int
    heads: int
    groups: int
    head_dim: int
    repeats: int


SHAPES = {"cpu": Shape(144, 2, 8, 8, 8, 3), "cuda": Shape(2064, 2, 32, 8, 128, 100)}


@dataclass(frozen=True)
class Row:
    """One comparison with one rank's results.

    Attributes:
        kind: what the ranks do (`rows.py`).
        cp, tp: context- and tensor-parallel degree; ranks are their product.
        layout: how rows lie over context-parallel ranks.
        columns: results that are compared.
    """

    name: str
    kind: str
    cp: int = 1
    tp: int = 1
    layout: str = "zigzag"
    columns: tuple[str, ...] = RESULTS

    @property
    def ranks(self) -> int:
        return self.cp * self.tp


def _meshes() -> list[Row]:
    rows = []
    for cp in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            if not 1 < cp * tp <= 8:
                continue
            name = "x".join(f"{kind}{size}" for kind, size in (("CP", cp), ("TP", tp)) if size > 1)
            for layout in ("zigzag", "contiguous") if cp > 1 else ("zigzag",):
                rows.append(Row(f"{name} {layout}" if cp > 1 else name, "mesh", cp, tp, layout))
    return rows


ROWS: tuple[Row, ...] = (
    Row("repeats", "repeats"),
    Row("one sequence alone", "alone"),
    Row("other batch rows beside it", "beside"),
    *_meshes(),
    Row("CP4 as two levels of groups", "levels", 4),
    Row("CP8 as two levels of groups", "levels", 8),
    Row("CP4, one key head at a time", "lean", 4),
    Row("packed, one rank", "packed"),
    Row("packed, CP4 zigzag", "packed", 4),
    Row("packed, CP4 contiguous", "packed", 4, layout="contiguous"),
    Row("decode over shuffled pages", "decode", columns=FORWARD),
    Row("chunk of prefill over shuffled pages", "chunk", columns=FORWARD),
)
BY_NAME = {row.name: row for row in ROWS}


def selected(names: list[str] | None, most: int) -> list[Row]:
    """The rows that are named, or all of at most `most` ranks.

    Raises:
        ValueError: a name that no row has.
    """
    if not names:
        return [row for row in ROWS if row.ranks <= most]
    unknown = sorted(set(names) - set(BY_NAME))
    if unknown:
        raise ValueError(f"no row {', '.join(map(repr, unknown))}; known: {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]
