"""The feed-forward block against transformers' Qwen3MLP, and over two GPUs against the vendor's products and sums.

Every cell compares bits first. It has a price before it runs: a cell whose price does not fit what is left of its
path's budget is listed with the price and never left out; from a path's first cell on, prices follow what cells cost.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
from rich.console import Console
from rich.table import Table

from megatron_plugins.verify import pool as ranks
from megatron_plugins.verify.outputs import add_json
from megatron_plugins.verify.progress import Progress
from megatron_plugins.verify.tables import print_table

ROWS = (1, 8, 32, 512, 2048, 4096, 8192)
FULL, SMALL = {"hidden": 4096, "intermediate": 12288}, {"hidden": 64, "intermediate": 128}
RATE = {"cuda": 2e13, "cpu": 1e8}
"""Multiply-adds a second at which a cell is priced before anything has run."""
COMPILING = {"cuda": 12.0, "cpu": 0.5}
"""Seconds for compiling kernels and making weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="M")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--path-budget-seconds", type=float, default=120.0, help="for all cells of a path")
    add_json(parser)


def plan(rows: list[int]) -> list[tuple[int, int, bool]]:
    """(ranks, rows, backward) of every cell."""
    return [(tp, m, backward) for tp in (1, 2) for backward in (False, True) for m in rows]


def path_of(tp: int, backward: bool) -> str:
    return f"forward{' and backward' if backward else ''}, tp{tp}"


def price(tp: int, rows: int, backward: bool, sizes: dict[str, int], device: str, repeats: int) -> float:
    """Seconds that a cell is expected to take, by its arithmetic."""
    work = 3 * max(rows, 128) * sizes["hidden"] * sizes["intermediate"] * (3 if backward else 1) / tp
    return COMPILING[device] + 4 * (repeats + 3) * work / RATE[device]


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if bits differ, 2 if there is no such device or no cell ran."""
    import torch

    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json == "-")
    if args.device == "cuda" and not torch.cuda.is_available():
        console.print("[bold]not run[/]: sought a GPU that torch can use, found none")
        return 2
    sizes = FULL if args.device == "cuda" else SMALL
    with tempfile.TemporaryDirectory(prefix="bench-ffn-") as folder:
        ranks.prepare_environment(Path(folder))
        found = measure(args, sizes, Path(folder), console)
    if args.json:
        results.save(found, args.json)
    show(found, console)
    ran = [cell for cell in found.cells if cell.skipped is None]
    return 1 if any(cell.mismatched for cell in ran) else 0 if ran else 2


def command(args: argparse.Namespace) -> str:
    """What was run, without places on this machine."""
    words = ["FILE" if word == str(args.json) else word for word in sys.argv[1:]]
    return shlex.join(["python", "scripts/bench.py", *words])


def measure(
    args: argparse.Namespace, sizes: dict[str, int], folder: Path, console: Console
) -> results.Results:
    """All cells."""
    cells: list[results.Cell] = []
    planned = plan(args.rows)
    with ranks.Pool(2, args.device, folder) as pool, Progress("ffn", len(planned), console) as progress:
        environment = results.Environment(**pool.run(1, "ffn_cells:environment", args.device)[0])
        budgets = Budgets(args.path_budget_seconds)
        for tp, rows, backward in planned:
            name = f"{path_of(tp, backward)}, M={rows}"
            progress.begin(name)
            cell = _cell(pool, budgets, name, tp, rows, backward, sizes, environment.gpus, args)
            cells.append(cell)
            progress.end(name, cell.skipped or f"{cell.ratio():.3f} of {cell.peer}, {cell.mismatched} differ")
    return results.Results(
        schema=results.SCHEMA, benchmark="ffn", command=command(args), environment=environment,
        sizes=sizes, planned=[cell.name for cell in cells], cells=cells,
    )  # fmt: skip


class Budgets:
    """Seconds left by path, and how prices turned out there."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._spent: dict[str, float] = {}
        self._scale: dict[str, float] = {}

    def price(self, path: str, estimate: float) -> float:
        """An estimate by what the path's last cell cost against its own."""
        return estimate * self._scale.get(path, 1.0)

    def left(self, path: str) -> float:
        return self.seconds - self._spent.get(path, 0.0)

    def spend(self, path: str, estimate: float, cost: float) -> None:
        self._spent[path] = self._spent.get(path, 0.0) + cost
        self._scale[path] = cost / estimate


def _cell(
    pool: ranks.Pool, budgets: Budgets, name: str, tp: int, rows: int, backward: bool, sizes: dict[str, int], gpus: int,
    args: argparse.Namespace,
) -> results.Cell:  # fmt: skip
    path = path_of(tp, backward)
    estimate = price(tp, rows, backward, sizes, args.device, args.repeats)
    cost = budgets.price(path, estimate)
    values: dict[str, Any] = {"ms": {}, "mismatched": None, "compared": None}
    counted: dict[str, Any] = {"moved": None, "peak_extra": {}}
    skipped, took = None, None
    if tp > 1 and gpus < tp:
        skipped = f"needs {tp} GPUs, found {gpus}"
    elif cost > budgets.left(path):
        skipped = f"priced at {cost:.0f} s, {budgets.left(path):.0f} s of the path's budget are left"
    else:
        start = time.monotonic()
        try:
            values = pool.run(tp, "ffn_cells:measure", rows, backward, sizes, args.device, args.repeats)[0]
        except ranks.WorldError as error:
            skipped = f"failed: {str(error)[-1500:]}"
        took = round(time.monotonic() - start, 2)
        budgets.spend(path, estimate, took)
    return results.Cell(
        name=name, path=path, rows=rows, topology=f"tp{tp}", peer="cuBLAS + NCCL" if tp > 1 else "Qwen3MLP",
        price_s=round(cost, 2), cost_s=took, skipped=skipped, **counted, **values,
    )  # fmt: skip


def show(found: results.Results, console: Console) -> None:
    """Times and ratios; skipped cells with reason and price."""
    table = Table(title=f"{found.benchmark}, {found.environment.device}", box=None, title_style="bold")
    for name in ("cell", "peer, ms", "ours, ms", "ours / peer", "differ"):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=name == "cell")
    for cell in found.cells:
        if cell.skipped is not None:
            table.add_row(cell.name, "-", "-", "not run", "-")
            continue
        table.add_row(
            cell.name, f"{cell.ms[cell.peer]:.4f}", f"{cell.ms['ours']:.4f}", f"{cell.ratio():.3f}",
            f"{cell.mismatched:,} of {cell.compared:,}",
        )  # fmt: skip
    print_table(console, table)
    for cell in found.cells:
        if cell.skipped is not None:
            console.print(
                f"not run: {cell.name}: {cell.skipped}; priced at {cell.price_s:.0f} s", markup=False
            )
