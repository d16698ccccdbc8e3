"""A training step of a Megatron GPT on one GPU: ours against upstream in the same run, and what costs how much.

Cells are priced before they run: one whose price does not fit the time that is left is listed with its price, and one
that cannot run here with the reason. Speed is shown only beside the bits: `verify model` is the check of those.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_plugins.verify.model.plan import SHAPES, Shape  # noqa: E402
from megatron_plugins.verify.outputs import add_json, write_json  # noqa: E402
from megatron_plugins.verify.tables import print_table  # noqa: E402

SIDES = {
    "upstream": "Megatron, local spec",
    "te": "Megatron, TransformerEngine spec",
    "deterministic": "ours",
}
WARM_UP_SECONDS = {"upstream": 60.0, "te": 30.0, "deterministic": 60.0}
"""Priced for imports, building, compiling and two steps."""
PRICED_FLOPS = 5e13
"""A step is priced at this rate: what the plain-torch references reach, not what kernels do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="time that all cells may take together")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add_json(parser)


def flops(shape: Shape) -> float:
    """Multiplications and additions of one forward and backward: three times two a weight and token, and attention."""
    tokens = shape.sequence * shape.batch * shape.micro_batches
    qkv = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.groups)
    layer = qkv + shape.hidden * shape.head_dim * shape.heads + 3 * shape.hidden * shape.ffn
    attention = shape.sequence * shape.heads * shape.head_dim  # causal: half of two products
    return 6.0 * tokens * (shape.layers * (layer + attention) + shape.hidden * shape.vocabulary)


def price(side: str, shape: Shape, repeats: int) -> float:
    """Seconds that a cell is expected to take."""
    return WARM_UP_SECONDS[side] + (repeats + 5) * flops(shape) / PRICED_FLOPS


def missing(side: str) -> str | None:
    """Why a side cannot run here."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed"
    if side == "te" and importlib.util.find_spec("transformer_engine") is None:
        return "TransformerEngine is not installed"
    return None


def measure(side: str, shape: Shape, repeats: int, seconds: float) -> dict[str, Any]:
    """One cell, in a process of its own; ``{"skipped": why}`` if it fails."""
    environment = {**os.environ}
    environment.pop("DETERMINISTIC_ROCM", None)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("model_side.py")), side]
    command += ["--shape", json.dumps(asdict(shape)), "--repeats", str(repeats)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done after {seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith('{"event": "side"'):
            return dict(json.loads(line))
    return {"skipped": f"ended with status {done.returncode}: {(done.stdout + done.stderr)[-2500:]}"}


def show(report: dict[str, Any], console: Console) -> None:
    """Step, memory and the cost of the parts, side by side."""
    cells = report["cells"]
    ran = {side: cell for side, cell in cells.items() if "skipped" not in cell}
    ours = ran.get("deterministic")
    if ran:
        _show_times(ran, ours, console)
    for side, cell in cells.items():
        if "skipped" in cell:
            console.print(
                f"not run: {SIDES[side]} ({cell['skipped']}); priced at {cell['price_s']:.0f} s", markup=False
            )


def _show_times(ran: dict[str, Any], ours: Any, console: Console) -> None:
    totals = Table(title="One training step", box=None, title_style="bold")
    totals.add_column("")
    for side in ran:
        totals.add_column(SIDES[side], justify="right")
    for side in ran:
        if side != "deterministic" and ours:
            totals.add_column(f"ours / {side}", justify="right")
    for key, name, unit in (
        ("step_ms", "forward and backward, ms", 1.0),
        ("optimizer_ms", "norm, clip and Adam, ms", 1.0),
        ("host_ms_per_layer", "host a layer, ms", 1.0),
        ("peak_bytes", "peak memory, GiB", 2.0**30),
    ):
        values = [f"{cell[key] / unit:.2f}" for cell in ran.values()]
        ratios = [
            f"{ours[key] / cell[key]:.2f}" for side, cell in ran.items() if side != "deterministic" and ours
        ]
        totals.add_row(name, *values, *ratios)
    print_table(console, totals)
    parts = Table(title="GPU time by part, ms: forward / backward", box=None, title_style="bold")
    parts.add_column("part")
    for side in ran:
        parts.add_column(SIDES[side], justify="right")
    names = list(dict.fromkeys(name for cell in ran.values() for name in cell["parts_ms"]))
    for name in names:
        shown = []
        for cell in ran.values():
            part = cell["parts_ms"].get(name)
            shown.append("-" if part is None else f"{part['forward']:.2f} / {part['backward']:.2f}")
        parts.add_row(name, *shown)
    print_table(console, parts)


def run(args: argparse.Namespace) -> int:
    """Measure every cell that fits; 2 if ours did not run."""
    start = time.monotonic()
    shape = replace(
        SHAPES["qwen3-8b-layers"], layers=args.layers, sequence=args.sequence, vocabulary=args.vocabulary, batch=1,
        micro_batches=1,
    )  # fmt: skip
    cells: dict[str, Any] = {}
    for side in args.sides:
        cost = price(side, shape, args.repeats)
        left = args.seconds - (time.monotonic() - start)
        why = missing(side) or (f"{left:.0f} s are left" if cost > left else None)
        cells[side] = {"skipped": why} if why else measure(side, shape, args.repeats, left)
        cells[side]["price_s"] = round(cost, 1)
    report = {"shape": asdict(shape), "flops_a_step": flops(shape), "cells": cells}
    # With --json the report alone goes to standard output.
    show(report, Console(stderr=args.json == "-"))
    write_json(args.json, report)
    return 2 if "skipped" in cells.get("deterministic", {"skipped": ""}) else 0
