"""What a benchmark's results.json holds. A key that is unknown or missing is an error, and so is a cell that is.

A renamed key that a reader skips in silence loses a row of the next report; so reading is strict, and the file names
the cells that were planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = 2

_T = TypeVar("_T")


class SchemaError(ValueError):
    """A results file is not what the schema says; the message names file, place and key."""


@dataclass(frozen=True)
class Environment:
    """Facts of the process that ran on the device, asked there.

    Attributes:
        device: name of the GPU, or "CPU".
        gpus: how many of them torch saw.
        torch, triton, transformers, megatron_core: versions; None where a package is not installed.
        cuda, hip: versions that torch was built for, or None.
    """

    device: str
    gpus: int
    torch: str
    triton: str
    transformers: str | None
    megatron_core: str | None
    cuda: str | None
    hip: str | None


@dataclass(frozen=True)
class Cell:
    """One cell: times of ours and of the peers in one run, or why there are none.

    Attributes:
        name: unique; a row of the report.
        path: "forward" or "forward and backward", and the topology; cells of a path share a budget.
        rows: tokens; bytes a rank for collectives.
        topology: "tp1", "tp2", "4 ranks".
        peer: key in `ms` that ratios are taken against.
        ms: median milliseconds by implementation; empty if skipped.
        mismatched, compared: elements of ours that differ from those of the check that comes before the times; None if
            skipped.
        moved: bytes S of a collective's algorithm bandwidth S / t; None in other benchmarks, and if skipped.
        peak_extra: most bytes of a rank beyond operands and results, by implementation; empty where nobody counted.
        price_s: seconds that the cell was expected to take.
        cost_s: seconds that it took; None if it did not begin.
        skipped: why there are no times, or None.
    """

    name: str
    path: str
    rows: int
    topology: str
    peer: str
    ms: dict[str, float]
    mismatched: int | None
    compared: int | None
    moved: int | None
    peak_extra: dict[str, int]
    price_s: float
    cost_s: float | None
    skipped: str | None

    def __post_init__(self) -> None:
        if self.skipped is None and not {self.peer, "ours"} <= set(self.ms):
            raise SchemaError(
                f"cell {self.name!r} has times of {sorted(self.ms)}: it needs 'ours' and the peer {self.peer!r}, or a "
                "reason in `skipped`"
            )
        if self.skipped is None and (self.mismatched is None or self.cost_s is None):
            raise SchemaError(f"cell {self.name!r} has times, but no count of mismatches or no cost")
        if unknown := sorted(set(self.peak_extra) - set(self.ms)):
            raise SchemaError(f"cell {self.name!r} has memory of {unknown}, of which it has no times")
        if self.skipped == "":
            raise SchemaError(f"cell {self.name!r} is skipped for no reason that is told")

    def bandwidth(self, name: str) -> float | None:
        """Algorithm bandwidth of `name` in bytes a second: S / t, as nccl-tests defines it (doc/PERFORMANCE.md)."""
        return None if self.moved is None else self.moved / (self.ms[name] * 1e-3)

    def ratio(self, name: str = "ours") -> float:
        """Time of `name` over the peer's."""
        return self.ms[name] / self.ms[self.peer]


@dataclass(frozen=True)
class Results:
    """A results file.

    Attributes:
        schema: `SCHEMA`.
        benchmark: name.
        command: what was run.
        environment: of the device.
        sizes: of the model.
        planned: names of all cells, in order.
        cells: as planned, each measured or skipped with a reason.
    """

    schema: int
    benchmark: str
    command: str
    environment: Environment
    sizes: dict[str, int]
    planned: list[str]
    cells: list[Cell]

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise SchemaError(f"schema {self.schema!r} of the results is not {SCHEMA}")
        found = [cell.name for cell in self.cells]
        if found != self.planned:
            missing = [name for name in self.planned if name not in found]
            extra = [name for name in found if name not in self.planned]
            raise SchemaError(
                f"cells are not those that were planned: missing {missing}, not planned {extra}, or another order"
            )
        if len(set(found)) != len(found):
            raise SchemaError(f"a cell's name occurs twice among {found}")


def _read(kind: type[_T], values: Any, where: str) -> dict[str, Any]:
    """`values` as keyword arguments of `kind`, every key accounted for."""
    if not isinstance(values, Mapping):
        raise SchemaError(f"{where} is {type(values).__name__}, not an object")
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown, missing = sorted(set(values) - known), sorted(known - set(values))
    if unknown or missing:
        raise SchemaError(
            f"{where}: unknown keys {unknown}, missing keys {missing}; the schema has {sorted(known)}"
        )
    return dict(values)


def parse(text: str, where: str) -> Results:
    """Results out of JSON.

    Raises:
        SchemaError: a key or a cell that is unknown or missing.
    """
    values = _read(Results, json.loads(text), where)
    values["environment"] = Environment(**_read(Environment, values["environment"], f"{where}: environment"))
    values["cells"] = [
        Cell(**_read(Cell, cell, f"{where}: cell {number}")) for number, cell in enumerate(values["cells"])
    ]
    return Results(**values)


def load(file: Path) -> Results:
    """Results of a file; raises as `parse`."""
    return parse(file.read_text(), str(file))


def save(results: Results, file: Path | str) -> None:
    """Write a file that `load` takes; ``-`` is standard output."""
    text = json.dumps(asdict(results), indent=1)
    parse(text, str(file))
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n")
