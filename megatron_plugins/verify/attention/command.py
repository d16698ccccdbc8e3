"""Runs the rows and shows, for each, how many elements differ from one rank's: table, JSON, plot."""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_plugins.verify.attention.plan import RESULTS, ROWS, SHAPES, selected
from megatron_plugins.verify.outputs import add_json, output_folder, write_json
from megatron_plugins.verify.progress import Progress
from megatron_plugins.verify.tables import print_table

SCHEMA = "deterministic-rocm/verify-attention/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"of: {'; '.join(row.name for row in ROWS)}")
    parser.add_argument("--ranks", type=int, default=8, help="without --rows: rows of at most so many ranks")
    for name in ("length", "repeats"):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"another number than the shape's {name}"
        )
    parser.add_argument(
        "--out", type=output_folder, default="out", help="folder of verify-attention.json and .png"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: every row is equal. 1: an element differs. 2: a row did not run."""
    import torch

    from megatron_plugins.verify.attention.ranks import run as run_rows
    from megatron_plugins.verify.attention.ranks import transport

    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json == "-")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        console.print("not run: --device cuda, and torch sees no GPU", markup=False)
        return 2
    changes = {name: getattr(args, name) for name in ("length", "repeats") if getattr(args, name) is not None}
    shape = replace(SHAPES[device], **changes)
    if shape.length % 48 or shape.length < 144:
        console.print(f"not run: --length {shape.length}; give a multiple of 48 from 144", markup=False)
        return 2
    try:
        rows = selected(args.rows, args.ranks)
    except ValueError as error:
        console.print(f"not run: {error}", markup=False)
        return 2
    world = max((row.ranks for row in rows), default=1)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": _environment(device) | {"transport": transport(device, world), "ranks": world},
        "shape": asdict(shape),
        "rows": {row.name: {"ran": False} for row in rows},
    }
    failure = None
    with (
        Progress("attention", total=len(rows), console=console) as progress,
        closing(run_rows(rows, shape, device)) as done,
    ):
        for row in rows:
            progress.begin(row.name)
        try:
            for row, columns, seconds in done:
                report["rows"][row.name] = {
                    "ran": True,
                    "ranks": row.ranks,
                    "columns": columns,
                    "seconds": seconds,
                }
                wrong, total = (sum(column[i] for column in columns.values()) for i in (0, 1))
                progress.end(row.name, f"{wrong:,} of {total:,} differ, {seconds:.1f} s")
        except RuntimeError as error:
            failure = str(error)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "verify-attention.json").write_text(json.dumps(report, indent=1) + "\n")
    _plot(report, args.out / "verify-attention.png")
    write_json(args.json, report)
    _show(report, console)
    if failure is not None:
        console.print(failure, markup=False)
    return status(report)


def status(report: dict[str, Any]) -> int:
    """The exit status of a report."""
    results = report["rows"].values()
    if any(column[0] for result in results if result["ran"] for column in result["columns"].values()):
        return 1
    return 0 if results and all(result["ran"] for result in results) else 2


def _environment(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "hip": torch.version.hip,
        }
    return found


def _show(report: dict[str, Any], console: Console) -> None:
    environment, shape = report["environment"], report["shape"]
    table = Table(title="Elements whose bits differ from one rank's", box=None, title_style="bold")
    table.add_column("row", no_wrap=True)
    table.add_column("ranks", justify="right")
    for name in RESULTS:
        table.add_column(name, justify="right")
    table.add_column("compared", justify="right")
    for name, result in report["rows"].items():
        if not result["ran"]:
            table.add_row(name, "", *["[yellow]not run[/yellow]"] * len(RESULTS), "")
            continue
        cells = []
        for column in RESULTS:
            wrong = result["columns"].get(column, [None])[0]
            cells.append("" if wrong is None else f"[{'red' if wrong else 'green'}]{wrong:,}[/]")
        table.add_row(
            name, str(result["ranks"]), *cells, f"{sum(c[1] for c in result['columns'].values()):,}"
        )
    print_table(console, table)
    where = environment.get("gpu", "CPU, the reference's arithmetic")
    gpus = environment.get("gpus")
    shared = "" if gpus is None or gpus >= environment["ranks"] else f", on {gpus} GPU that ranks share"
    console.print(
        f"{where}; {environment['ranks']} processes{shared}, bytes over {environment['transport']}; length "
        f"{shape['length']}, batch {shape['batch']}, {shape['heads']} heads, {shape['groups']} groups, head dimension "
        f"{shape['head_dim']}, bfloat16, causal.",
        markup=False,
    )


def _plot(report: dict[str, Any], path: Path) -> None:
    """Share of differing elements by row and result; grey did not run or has no such result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    rows = list(report["rows"])
    share = np.full((len(rows), len(RESULTS)), np.nan)
    for i, name in enumerate(rows):
        for column, (wrong, total) in report["rows"][name].get("columns", {}).items():
            share[i, RESULTS.index(column)] = wrong / total
    figure, axis = plt.subplots(figsize=(6, 1.5 + 0.24 * len(rows)))
    axis.set_facecolor("lightgrey")
    image = axis.imshow(
        share, aspect="auto", cmap="RdYlGn_r", vmin=0, vmax=max(1e-3, float(np.nanmax(share, initial=0)))
    )
    axis.set_xticks(range(len(RESULTS)), RESULTS)
    axis.set_yticks(range(len(rows)), rows, fontsize=7)
    figure.colorbar(image, label="share of elements that differ")
    axis.set_title("Attention against one rank", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
