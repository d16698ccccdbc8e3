"""The collectives against the library's own, from 1 KiB to 512 MiB a rank: latency of the rank that was slowest in a
call, algorithm bandwidth, peak extra memory; ours by the table of transports and by every other one that can carry it.

Bits first: ours against the tree over ranks that every rank computes from what all of them had. Cells are priced before
they run; one that does not fit the budget of its path is listed with its price.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import results
from ffn import Budgets, command, show
from rich.console import Console

from megatron_plugins.verify import pool as ranks
from megatron_plugins.verify.outputs import output_file
from megatron_plugins.verify.progress import Progress

OPERATIONS = ("reduce_scatter", "reduce_scatter_many", "all_reduce", "all_gather")
SIZES = {
    "cuda": tuple(1 << power for power in (10, 16, 20, 22, 24, 26, 28, 29)),
    "cpu": tuple(1 << power for power in (10, 16, 20, 22)),
}
"""Bytes of one operand of a rank; `reduce_scatter_many` has two."""
RATE = {"cuda": 2e10, "cpu": 2e8}
"""Bytes a second at which a cell is priced before anything has run."""
MOST_WAYS = 6
"""Implementations of a cell: the library, ours by the table, and by four more transports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default cuda")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--bytes", type=int, nargs="+", metavar="N", help="bytes a rank")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument(
        "--path-budget-seconds", type=float, default=60.0, help="for all sizes of an operation"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="for scripts/report.py")


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if bits differ, 2 if there is no such device or no cell ran."""
    import torch

    console = Console()
    if args.device == "cuda" and not torch.cuda.is_available():
        console.print("[bold]not run[/]: sought a GPU that torch can use, found none")
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-collectives-") as folder:
        ranks.prepare_environment(Path(folder))
        found = measure(args, Path(folder), console)
    if args.json:
        results.save(found, args.json)
    show(found, console)
    ran = [cell for cell in found.cells if cell.skipped is None]
    return 1 if any(cell.mismatched for cell in ran) else 0 if ran else 2


def plan(args: argparse.Namespace) -> list[tuple[int, str, int]]:
    """(ranks, operation, bytes) of every cell."""
    return [
        (world, operation, size)
        for world in args.worlds
        for operation in OPERATIONS
        for size in args.bytes or SIZES[args.device]
    ]


def price(world: int, size: int, device: str, repeats: int) -> float:
    """Seconds that a cell is expected to take, by what a rank receives where it receives everything."""
    return 0.5 + MOST_WAYS * (repeats + 5) * (2e-4 * world + size * world / RATE[device])


def measure(args: argparse.Namespace, folder: Path, console: Console) -> results.Results:
    """All cells."""
    planned = plan(args)
    cells: list[results.Cell] = []
    with (
        ranks.Pool(max(args.worlds), args.device, folder) as pool,
        Progress("collectives", len(planned), console) as progress,
    ):
        environment = results.Environment(**pool.run(1, "ffn_cells:environment", args.device)[0])
        budgets = Budgets(args.path_budget_seconds)
        for world, operation, size in planned:
            name = f"{operation} over {world}, {size} bytes"
            progress.begin(name)
            cells.append(_cell(pool, budgets, name, world, operation, size, environment.gpus, args))
            cell = cells[-1]
            progress.end(name, cell.skipped or f"{cell.ratio():.3f} of {cell.peer}, {cell.mismatched} differ")
    return results.Results(
        schema=results.SCHEMA, benchmark="collectives", command=command(args), environment=environment,
        sizes={"repeats": args.repeats}, planned=[cell.name for cell in cells], cells=cells,
    )  # fmt: skip


def _cell(
    pool: ranks.Pool, budgets: Budgets, name: str, world: int, operation: str, size: int, gpus: int,
    args: argparse.Namespace,
) -> results.Cell:  # fmt: skip
    path = f"{operation}, {world} ranks"
    estimate = price(world, size, args.device, args.repeats)
    cost = budgets.price(path, estimate)
    values: dict[str, Any] = {
        "ms": {}, "mismatched": None, "compared": None, "moved": None, "peak_extra": {},
    }  # fmt: skip
    skipped, took = None, None
    if args.device == "cuda" and gpus < world:
        skipped = f"needs {world} GPUs, found {gpus}"
    elif cost > budgets.left(path):
        skipped = f"priced at {cost:.0f} s, {budgets.left(path):.0f} s of the path's budget are left"
    else:
        start = time.monotonic()
        try:
            values = pool.run(world, "collectives_cells:measure", operation, size, args.device, args.repeats)[
                0
            ]
        except ranks.WorldError as error:
            skipped = f"failed: {str(error)[-1500:]}"
        took = round(time.monotonic() - start, 2)
        budgets.spend(path, estimate, took)
    return results.Cell(
        name=name, path=path, rows=size, topology=f"{world} ranks", peer="library", price_s=round(cost, 2),
        cost_s=took, skipped=skipped, **values,
    )  # fmt: skip
