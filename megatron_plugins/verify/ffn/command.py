"""``python -m megatron_plugins.verify ffn``: mismatches of the feed-forward block, layout by layout."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_plugins.verify import pool as ranks
from megatron_plugins.verify.ffn import plan
from megatron_plugins.verify.outputs import add_json, write_json
from megatron_plugins.verify.progress import Progress
from megatron_plugins.verify.tables import print_table

RANK = "megatron_plugins.verify.ffn.rank"
COLUMNS = ("forward", "training output", "train = infer", "repeats", "dHidden")
EQUAL, MISMATCH, NOT_RUN = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU, else cpu"
    )
    add_json(parser)
    parser.add_argument("--full", action="store_true", help="4096 and 12288 on a CPU too; takes hours there")
    parser.add_argument(
        "--hidden", type=int, help=f"default {plan.FULL[0]} on a GPU, {plan.SMALL[0]} on a CPU"
    )
    parser.add_argument("--intermediate", type=int, help=f"default {plan.FULL[1]}, {plan.SMALL[1]} on a CPU")
    parser.add_argument("--ranks", type=int, default=8, help="leave out layouts with more ranks")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name contains TEXT, e.g. tp2_cp2")
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="cases that would start later are not run"
    )


def run(args: argparse.Namespace) -> int:
    """Run every case; 1 if an element differs, an error is too large or work is done twice, 2 if one did not run."""
    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json == "-")
    if importlib.util.find_spec("megatron") is None:
        console.print("[bold]not run[/]: sought megatron-core, found none; pip install megatron-core")
        return NOT_RUN
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        console.print(
            "[bold]not run[/]: sought a GPU that torch can use, found none; --device cpu runs the references"
        )
        return NOT_RUN
    hidden, intermediate = plan.FULL if device == "cuda" or args.full else plan.SMALL
    hidden, intermediate = args.hidden or hidden, args.intermediate or intermediate
    wanted = [case for case in plan.cases(args.ranks) if not args.only or args.only in case.name]
    if not wanted:
        names = ", ".join(case.name for case in plan.cases(args.ranks))
        console.print(f"not run: no case has {args.only!r} in its name; there are {names}", markup=False)
        return NOT_RUN
    with tempfile.TemporaryDirectory(prefix="verify-ffn-", dir=_roomy()) as name:
        ranks.prepare_environment(Path(name))
        try:
            report = _run_all(wanted, args.seconds, console, Path(name), device, hidden, intermediate)
        except ranks.WorldError as error:
            console.print(f"not run: {error}", markup=False)
            return NOT_RUN
    write_json(args.json, report)
    show(report, console)
    return verdict(report)


def _roomy() -> str | None:
    """Baselines are gigabytes that live for a minute: memory is the place for them where there is such a folder."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK):
        found = os.statvfs(shm)
        if found.f_bavail * found.f_frsize > 8 << 30:
            return str(shm)
    return None


def _run_all(
    wanted: list[plan.Case],
    seconds: float,
    console: Console,
    folder: Path,
    device: str,
    hidden: int,
    intermediate: int,
) -> dict[str, Any]:
    import patches.auto  # noqa: F401  before megatron is imported

    if device == "cpu":
        # Forked ranks find it imported.
        import megatron_plugins.verify.ffn.rank  # noqa: F401
    import megatron.core

    deadline = time.monotonic() + seconds
    meshes = list(dict.fromkeys(case.mesh for case in wanted))
    report: dict[str, Any] = {
        "check": "ffn", "device": device, "hidden": hidden, "intermediate": intermediate,
        "megatron_core": megatron.core.__version__, "rows": [], "precision": None, "work": [],
        "library": [], "library_not_run": None,
    }  # fmt: skip
    sizes = (hidden, intermediate, device)
    with (
        ranks.Pool(max(case.mesh.ranks for case in wanted), device, folder) as pool,
        Progress("ffn", len(wanted) + len(meshes) + 1 + (device == "cuda"), console) as progress,
    ):
        report["environment"] = pool.run(1, f"{RANK}:environment", device)[0]
        baselines: dict[tuple[int, str], str] = {}
        for case in wanted:
            progress.begin(case.name)
            row = _case(pool, case, sizes, baselines, folder, deadline)
            report["rows"].append(row)
            progress.end(case.name, _line(row))
        # Work is counted where the references run, so on the host; not forked from a process that has seen a GPU.
        with ranks.Pool(pool.ranks, "cpu", folder, start=pool.start) as hosts:
            for mesh in meshes:
                progress.begin(f"work of {mesh.name}")
                row = _work(hosts, mesh, deadline)
                report["work"].append(row)
                progress.end(
                    f"work of {mesh.name}",
                    row.get("skipped") or f"{max(row['flops']):,} multiply-adds a rank",
                )
        if device == "cuda":
            progress.begin("library products")
            try:
                report["library"] = pool.run(1, f"{RANK}:try_certificates")[0]
            except ranks.WorldError as error:
                report["library_not_run"] = str(error)[-1500:]
            progress.end("library products", f"{len(report['library'])} certificates tried again")
        progress.begin("errors")
        try:
            report["precision"] = pool.run(1, "megatron_plugins.verify.ffn.precision:errors", 32, *sizes)[0]
        except ranks.WorldError as error:
            report["precision"] = {"skipped": str(error)[-1500:]}
        progress.end("errors", "against float64")
    return report


def _case(
    pool: ranks.Pool, case: plan.Case, sizes: tuple[int, int, str], baselines: dict[tuple[int, str], str],
    folder: Path, deadline: float,
) -> dict[str, Any]:  # fmt: skip
    """One row of the report."""
    row: dict[str, Any] = {
        "case": case.name, "mesh": case.mesh.name, "ranks": case.mesh.ranks, "rows": case.rows, "kind": case.kind,
    }  # fmt: skip
    start = time.monotonic()
    if start > deadline:
        return row | {"skipped": "the time of --seconds was up"}
    kind = "backward" if case.kind == "backward" else "forward"
    key = (case.rows, kind)
    try:
        if key not in baselines:
            file = str(folder / f"baseline-{case.rows}-{kind}.pt")
            pool.run(1, f"{RANK}:run_baseline", case.rows, kind, *sizes, file)
            baselines[key] = file
        answers = pool.run(case.mesh.ranks, f"{RANK}:run_case", case, *sizes, baselines[key])
    except ranks.WorldError as error:
        return row | {"skipped": str(error)[-1500:]}
    columns: dict[str, list[int]] = {}
    for records in answers:
        for column, mismatched, total in records:
            found = columns.setdefault(column, [0, 0])
            found[0] += mismatched
            found[1] += total
    return row | {
        "bytes_over": ranks.backend_of(sizes[2], case.mesh.ranks) if case.mesh.ranks > 1 else None,
        "seconds": round(time.monotonic() - start, 2),
        "columns": {name: {"mismatched": m, "total": t} for name, (m, t) in columns.items()},
    }


def _work(pool: ranks.Pool, mesh: plan.Mesh, deadline: float) -> dict[str, Any]:
    """Multiply-adds a rank against its share of one rank's."""
    row: dict[str, Any] = {"mesh": mesh.name, "ranks": mesh.ranks}
    if time.monotonic() > deadline:
        return row | {"skipped": "the time of --seconds was up"}
    # Closed formula: three products of 32 rows forward, twice that backward.
    share = 3 * 3 * 32 * plan.SMALL[0] * plan.SMALL[1] // mesh.ranks
    try:
        answers = pool.run(mesh.ranks, f"{RANK}:run_work", mesh, *plan.SMALL)
    except ranks.WorldError as error:
        return row | {"skipped": str(error)[-1500:]}
    return row | {
        "flops": [answer["flops"] for answer in answers],
        "bytes": [answer["bytes"] for answer in answers],
        "share": share,
    }


def _line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"not run: {row['skipped'].strip().splitlines()[-1]}"
    mismatched = sum(column["mismatched"] for column in row["columns"].values())
    total = sum(column["total"] for column in row["columns"].values())
    return f"{mismatched:,} of {total:,} elements differ"


def failures(report: dict[str, Any]) -> list[str]:
    """What a report shows that the contract rules out, one sentence each."""
    from megatron_plugins.verify.ffn.precision import MOST

    out = []
    for row in report["rows"]:
        for name, column in row.get("columns", {}).items():
            if column["mismatched"]:
                out.append(
                    f"{row['case']}: {name}: {column['mismatched']:,} of {column['total']:,} elements differ"
                )
    for row in report["work"]:
        for rank, flops in enumerate(row.get("flops", [])):
            if flops != row["share"]:
                out.append(
                    f"{row['mesh']}: rank {rank} executes {flops:,} multiply-adds, its share is {row['share']:,}"
                )
    for product in report["library"]:
        if product["was"] and not product["is"]:
            out.append(
                f"library product {product['shape']} was certified and is not equal now: {product['why']}"
            )
    found = report["precision"] or {}
    for name, most in MOST.items():
        if name in found and found[name] > most * found["Qwen3MLP"]:
            out.append(
                f"error of {name} is {found[name]:.3e}, more than {most} times Qwen3MLP's {found['Qwen3MLP']:.3e}"
            )
    return out


def not_run(report: dict[str, Any]) -> list[str]:
    """What was asked for and did not run, and why."""
    rows = [
        *report["rows"],
        *report["work"],
        {"case": "errors", **(report["precision"] or {"skipped": "not reached"})},
    ]
    out = [f"{row.get('case') or row['mesh']}: {row['skipped']}" for row in rows if "skipped" in row]
    if report["library_not_run"]:
        out.append(f"library products: {report['library_not_run']}")
    return out


def verdict(report: dict[str, Any]) -> int:
    """The exit status."""
    return MISMATCH if failures(report) else NOT_RUN if not_run(report) else EQUAL


def show(report: dict[str, Any], console: Console) -> None:
    """Mismatches by case and column, work, errors, and what did not run."""
    names = list(dict.fromkeys([*COLUMNS, *(n for row in report["rows"] for n in row.get("columns", {}))]))
    table = Table(title="Elements that differ from one rank's", box=None, title_style="bold")
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("of", justify="right", no_wrap=True)
    for row in report["rows"]:
        if "skipped" in row:
            continue
        cells = [row["columns"].get(name) for name in names]
        shown = ["-" if cell is None else f"{cell['mismatched']:,}" for cell in cells]
        table.add_row(row["case"], *shown, f"{sum(cell['total'] for cell in cells if cell):,}")
    print_table(console, table)
    work = Table(
        title="Multiply-adds a rank, 32 rows forward and backward (CPU references)",
        box=None,
        title_style="bold",
    )
    for name in ("layout", "a rank", "the sharded job's", "bytes sent a rank"):
        work.add_column(name, justify="right")
    for row in report["work"]:
        if "skipped" not in row:
            work.add_row(row["mesh"], f"{max(row['flops']):,}", f"{row['share']:,}", f"{max(row['bytes']):,}")
    print_table(console, work)
    if report["precision"] and "skipped" not in report["precision"]:
        _show_errors(report["precision"], console)
    if report["library"]:
        equal = sum(product["is"] for product in report["library"])
        console.print(f"Library products: {len(report['library'])} certificates tried again, {equal} equal.")
    gloo = any(row.get("bytes_over") == "gloo" for row in report["rows"])
    if report["device"] == "cuda" and gloo:
        console.print("Ranks shared a GPU: real processes and kernels, their bytes went over gloo.")
    for line in not_run(report):
        console.print(f"not run: {line}", markup=False)
    for line in failures(report):
        console.print(f"[bold red]FAILED[/] {line}")
    totals = [c for row in report["rows"] for c in row.get("columns", {}).values()]
    console.print(
        f"[bold]{sum(c['mismatched'] for c in totals):,} of {sum(c['total'] for c in totals):,} elements differ[/], "
        f"hidden {report['hidden']}, intermediate {report['intermediate']}, {report['environment']['device']}"
    )


def _show_errors(found: dict[str, Any], console: Console) -> None:
    table = Table(title="Relative error against float64, 32 rows", box=None, title_style="bold")
    for name in ("", "error", "of Qwen3MLP's"):
        table.add_column(name, justify="right")
    for name in ("Qwen3MLP", "bf16 lanes", "float32 lanes"):
        note = f" ({found['peer']})" if name == "Qwen3MLP" else ""
        table.add_row(name + note, f"{found[name]:.4e}", f"{found[name] / found['Qwen3MLP']:.3f}")
    print_table(console, table)
