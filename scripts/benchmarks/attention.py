"""Attention on one GPU against its peers in the same run: bits and error first, then time.

Peers: SDPA on cuDNN and on flash attention, cuDNN launched once a key head (what makes a library's bits independent of
the number of heads), TransformerEngine's module where it is installed, and this project's portable kernels beside
Hopper's. Cells are priced before they run: one whose price does not fit the time that is left is listed with it, and a
peer that does not run here with the reason. Times are medians of CUDA events, all candidates in turn, cold L2, random
data; speed is a peer's time over ours. One whose check failed has no time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_plugins.verify.outputs import add_json, write_json
from megatron_plugins.verify.tables import print_table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu")]

PRICED_FLOPS = 1.5e14
"""A cell is priced at this rate, the slowest side's; it is passed `REPEATS` times a side and pass."""
REPEATS, SIDES = 15, 6
COMPILE_SECONDS = {"hopper": 6.0, "portable": 12.0}
"""The first cell of a head dimension compiles."""
ERROR_LENGTH = 1024
"""Errors against float64 are measured at this length: a score matrix of all heads must fit."""


@dataclass(frozen=True)
class Cell:
    """One shape; causal, bfloat16.

    Attributes:
        s, batch: length and number of sequences.
        heads, groups, d: query heads, key heads, head dimension.
    """

    s: int
    batch: int
    heads: int
    groups: int
    d: int

    @property
    def name(self) -> str:
        return f"d{self.d} S{self.s}" + (f" b{self.batch}" if self.batch > 1 else "")

    def price(self, first: bool) -> float:
        """Seconds that the cell is expected to take."""
        flops = 2.0 * self.s * self.s * self.d * self.heads * self.batch * 3.5
        return REPEATS * SIDES * flops / PRICED_FLOPS + (sum(COMPILE_SECONDS.values()) if first else 0.5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="time that all cells may take together")
    add_json(parser)


def _cudnn(x: list[Any], each_group: bool = False) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of SDPA's cuDNN operators over [s, b, h, d] operands, in one launch or one a key head."""
    import torch

    aten = torch.ops.aten
    whole = [t.permute(1, 2, 0, 3).contiguous() for t in x]
    count = whole[1].shape[1] if each_group else 1
    parts = [[t.chunk(count, 1)[index].contiguous() for t in whole] for index in range(count)]

    def forward() -> Any:
        return [
            aten._scaled_dot_product_cudnn_attention(*part[:3], None, True, 0.0, True, False)
            for part in parts
        ]

    kept = forward()

    def backward() -> Any:
        return [
            aten._scaled_dot_product_cudnn_attention_backward(
                part[3], *part[:3], *one[:2], one[6], one[7], None, *one[2:6], 0.0, True
            )
            for part, one in zip(parts, kept, strict=True)
        ]

    return forward, backward


def _flash(x: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of SDPA on flash attention."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, grad = (t.permute(1, 2, 0, 3).contiguous() for t in x)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def forward(operands: Any = (q, k, v)) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)

    out = forward(leaves)
    return forward, lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _te(x: list[Any], cell: Cell) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """TransformerEngine's module at CP=1."""
    import torch
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        cell.heads, cell.d, num_gqa_groups=cell.groups, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal",
    )  # fmt: skip
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    out = module(*leaves)
    grad = x[3].reshape(out.shape)
    return lambda: module(*x[:3]), lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _ours(x: list[Any], entries: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Our kernels; `entries` asks for the portable ones."""
    from attention_bits import CAUSAL, whole

    from te_overrides.kernels.attention import kernel

    q, k, v, grad = x
    runs, options = whole(q.shape[0]), {"mask": CAUSAL, "entries": entries}
    out, lse = kernel.attention_forward(q, k, v, runs, **options)

    def backward() -> Any:
        statistics = kernel.attention_statistics(grad, out, lse)
        return (
            kernel.attention_dq(q, k, v, grad, *statistics, runs, **options),
            *kernel.attention_dkv(q, k, v, grad, *statistics, runs, **options),
        )

    return lambda: kernel.attention_forward(q, k, v, runs, **options), backward


def sides_of(cell: Cell, x: list[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Forward and backward by side, and why a side is not there."""
    from te_overrides.kernels.architecture import architecture
    from te_overrides.kernels.attention.launch_table import entries_for

    makers: dict[str, Callable[[], Any]] = {
        "ours": lambda: _ours(x, None),
        "portable": lambda: _ours(x, entries_for(architecture(x[0].device), cell.d)),
        "cuDNN": lambda: _cudnn(x),
        "flash": lambda: _flash(x),
        "cuDNN, a launch a key head": lambda: _cudnn(x, each_group=True),
        "TransformerEngine": lambda: _te(x, cell),
    }
    made, absent = {}, {}
    for name, make in makers.items():
        if name == "TransformerEngine" and importlib.util.find_spec("transformer_engine") is None:
            absent[name] = "not installed"
            continue
        try:
            made[name] = make()
        except (RuntimeError, ValueError, LookupError, ImportError) as error:
            absent[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return made, absent


def check(made: dict[str, Any], repeats: int = 3) -> dict[str, Any]:
    """Elements that differ between Hopper's and the portable kernels, and between calls."""
    from te_overrides.kernels.bits import count_mismatches

    want = [tensor.clone() for call in made["ours"] for tensor in call()]
    found = {}
    for name in ("portable", *["ours"] * repeats):
        if name not in made:
            continue
        got = [tensor for call in made[name] for tensor in call()]
        counts = [count_mismatches(a, b)[:2] for a, b in zip(got, want, strict=True)]
        key = "against portable" if name == "portable" else "repeated"
        before = found.get(key, [0, 0])
        found[key] = [before[i] + sum(count[i] for count in counts) for i in (0, 1)]
    return found


def errors(head_dim: int) -> dict[str, Any]:
    """Relative error (Frobenius) against float64, ours over cuDNN's, at `ERROR_LENGTH`."""
    import torch
    from attention_bits import NAMES, everything, operands, whole
    from attention_checks import exact, library

    x = operands(ERROR_LENGTH, 1, 8, 2, head_dim, torch.bfloat16)
    want, theirs = exact(x), library(x)
    ours = dict(everything(x, whole(ERROR_LENGTH), whole(ERROR_LENGTH)))
    found = {}
    for name in NAMES:
        if name in want:
            ratio = [
                float((r[name].double() - want[name]).norm() / want[name].norm()) for r in (ours, theirs)
            ]
            found[name] = {"ours": ratio[0], "cuDNN": ratio[1], "ratio": ratio[0] / ratio[1]}
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """Checks, then milliseconds by side and pass."""
    import torch
    from attention_bits import operands
    from attention_checks import race

    torch.manual_seed(0)
    x = operands(cell.s, cell.batch, cell.heads, cell.groups, cell.d, torch.bfloat16)
    made, absent = sides_of(cell, x)
    checks = check(made)
    if any(wrong for wrong, _ in checks.values()):
        return {"checks": checks, "absent": absent, "ms": {}}
    ms = {
        name: race({side: calls[index] for side, calls in made.items()}, REPEATS if cell.s <= 8192 else 5)
        for index, name in enumerate(("forward", "backward"))
    }
    return {"checks": checks, "absent": absent, "ms": ms}


def rows_of(report: dict[str, Any]) -> list[list[str]]:
    """Table rows: cell, pass, milliseconds of every side and our speed against it."""
    rows = []
    for name, cell in report["cells"].items():
        if "skipped" in cell:
            rows.append([name, f"not run: {cell['skipped']} (priced at {cell['price_s']:.0f} s)"])
            continue
        if not cell["ms"]:
            rows.append([name, f"bits differ, not timed: {cell['checks']}"])
            continue
        for which, ms in cell["ms"].items():
            sides = [f"{ms[s]:.4f} ({ms[s] / ms['ours']:.2f})" if s in ms else "-" for s in report["sides"]]
            rows.append([name, which, *sides])
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = [f"# Attention: {report['environment']['gpu']}, torch {report['environment']['torch']}", ""]
    lines += ["Milliseconds (our speed against it); causal, bfloat16.", ""]
    head = ["cell", "pass", *report["sides"]]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row + [""] * (len(head) - len(row))) + " |" for row in rows_of(report)]
    lines += ["", "Relative error against float64, ours / cuDNN's:", ""]
    for d, found in report["errors"].items():
        lines.append(
            f"- d {d}: " + ", ".join(f"{n} {e['ours']:.3e} / {e['cuDNN']:.3e}" for n, e in found.items())
        )
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Our speed against every peer, by cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    cells = {name: cell["ms"] for name, cell in report["cells"].items() if cell.get("ms")}
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        for side in report["sides"]:
            points = [
                (n, ms[which][side] / ms[which]["ours"]) for n, ms in cells.items() if side in ms[which]
            ]
            if side != "ours" and points:
                axis.plot(*zip(*points, strict=True), marker="o", label=side)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_title(which)
        axis.tick_params(axis="x", rotation=30)
    axes[0].set_ylabel("a peer's time over ours")
    if cells:
        axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run(args: argparse.Namespace) -> int:
    """0: measured. 1: bits differ. 2: nothing ran."""
    import torch

    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json == "-")
    if not torch.cuda.is_available():
        console.print("not run: sought a GPU that torch can use, found none", markup=False)
        return 2
    start = time.monotonic()
    report: dict[str, Any] = {
        "environment": {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "hip": torch.version.hip,
        },
        "errors": {}, "cells": {}, "sides": [],
    }  # fmt: skip
    seen: set[int] = set()
    for d in args.head_dims:
        for s in args.lengths:
            cell = Cell(s, 1, args.heads, args.groups, d)
            price, left = cell.price(d not in seen), args.seconds - (time.monotonic() - start)
            if price > left:
                report["cells"][cell.name] = {
                    "skipped": f"{left:.0f} s are left of --seconds {args.seconds:.0f}", "price_s": price
                }  # fmt: skip
                continue
            began = time.monotonic()
            found = measure(cell)
            if d not in seen and torch.version.hip is None:
                report["errors"][str(d)] = errors(d)
            seen.add(d)
            report["cells"][cell.name] = {
                **asdict(cell),
                **found,
                "price_s": price,
                "seconds": time.monotonic() - began,
            }
            report["sides"] += [
                side for side in found["ms"].get("forward", {}) if side not in report["sides"]
            ]
            console.print(
                f"{cell.name}: {report['cells'][cell.name]['seconds']:.1f} s, priced at {price:.1f} s"
            )
            _write(report, args.json)
    _show(report, console)
    _write(report, args.json)
    if args.json == "-":
        write_json(args.json, report)
    ran = [cell for cell in report["cells"].values() if "skipped" not in cell]
    return 1 if any(not cell["ms"] for cell in ran) else 0 if ran else 2


def _write(report: dict[str, Any], asked: str | None) -> None:
    """JSON into a file, Markdown and plot beside it; after every cell, so that a run that is cut short leaves what it
    measured."""
    if asked in (None, "-"):
        return
    write_json(asked, report)
    path = Path(asked)
    path.with_suffix(".md").write_text(markdown(report))
    plot(report, path.with_suffix(".png"))


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(title="Attention, ms (our speed against it)", box=None, title_style="bold")
    for name in ("cell", "pass", *report["sides"]):
        table.add_column(name, justify="left" if name in ("cell", "pass") else "right")
    notes = []
    for row in rows_of(report):
        if len(row) == 2:
            notes.append(f"{row[0]}: {row[1]}")
        else:
            table.add_row(*row)
    print_table(console, table)
    absent = {s: why for cell in report["cells"].values() for s, why in cell.get("absent", {}).items()}
    notes += [f"not run: {side} ({why})" for side, why in absent.items()]
    for d, found in report["errors"].items():
        notes.append(
            f"error against float64 over cuDNN's, d {d}: "
            + ", ".join(f"{name} {e['ratio']:.3f}" for name, e in found.items())
        )
    for note in notes:
        console.print(note, markup=False)
