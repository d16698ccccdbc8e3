"""``python -m megatron_plugins.verify model``: starts an engine a side, collects its events, writes the report."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_plugins.verify.interrupts import deaf_children
from megatron_plugins.verify.model import report as reporting
from megatron_plugins.verify.model.plan import DEFAULT_SHAPE, ROWS, SHAPES, Row, Shape, selected, why_not
from megatron_plugins.verify.outputs import add_json, output_folder, write_json
from megatron_plugins.verify.progress import Progress

ROOT = Path(__file__).resolve().parents[3]
ENGINE = (sys.executable, "-W", "ignore", "-m", "megatron_plugins.verify.model.engine")


ENDING_SECONDS = 20.0
"""An engine that is asked to end has this long."""


class RowProgress(Progress):
    """Progress that tells the steps of the rows under way; without a terminal only rows."""

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        super().__init__(title, total, console)
        self.steps: dict[str, str] = {}

    def step(self, name: str, done: int, steps: int) -> None:
        """A row that was begun has done `done` of `steps` steps."""
        self.steps[name] = f"{name} (step {done} of {steps})"
        if self._bar is not None:
            shown = ", ".join(self.steps.get(running, running) for running in self.running)
            self._bar.update(self._task, running=shown)


class EngineFailure(RuntimeError):
    """An engine ended before it had reported all its rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"of: {', '.join(row.name for row in ROWS)}")
    parser.add_argument(
        "--ranks", type=int, help="without --rows: rows of at most so many ranks (8; on a GPU 4)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--shape", choices=SHAPES, help="default: small on a CPU, qwen3-8b-layers on a GPU")
    for name in ("layers", "sequence", "batch", "vocabulary"):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"another number than the shape's {name}"
        )
    parser.add_argument("--no-upstream", action="store_true", help="measure our side alone")
    parser.add_argument(
        "--te-sources", type=Path, default=ROOT / ".venv" / "transformer-engine-sources",
        help="unpacked TransformerEngine wheel: on a CPU its ring is upstream's figure under context parallelism",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=output_folder, default="out", help="folder of verify-model.json, .md and .png"
    )
    add_json(parser)


def events(
    side: str, options: Sequence[str], engine: Sequence[str] = ENGINE
) -> Generator[dict[str, Any], None, None]:
    """Events of one engine; whatever else it prints is shown only if it fails.

    Raises:
        EngineFailure: it ended with another status than 0.
    """
    environment = {**os.environ}
    places = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    environment.pop("DETERMINISTIC_ROCM", None)
    with tempfile.TemporaryFile("w+", errors="replace") as chatter:
        with deaf_children():
            process = subprocess.Popen(
                [*engine, side, *options], stdout=subprocess.PIPE, stderr=chatter, text=True, env=environment
            )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
            if process.wait():
                chatter.seek(0)
                raise EngineFailure(
                    f"the engine of side {side!r} ended with status {process.returncode}:\n"
                    f"{''.join(chatter.readlines()[-40:])}"
                )
        finally:
            if process.poll() is None:
                _end(process)


def _end(engine: subprocess.Popen[str]) -> None:
    """An engine ends its ranks and removes its files when it is asked to; one that is killed cannot."""
    engine.terminate()
    try:
        engine.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()


def result_of(event: dict[str, Any]) -> dict[str, Any]:
    """A row's result out of the event that ends it."""
    if event["event"] == "failed":
        return {"ran": False, "why": event["message"], "failed": True}
    columns = {
        name: {**column, "max_abs": column["max_abs"] if math.isfinite(column["max_abs"]) else None}
        for name, column in event["columns"].items()
    }
    return {
        "ran": True, "columns": columns, "seconds": round(event["seconds"], 2), "peak_bytes": event["peak_bytes"]
    }  # fmt: skip


def _summary(result: dict[str, Any]) -> str:
    if not result["ran"]:
        return "failed"
    mismatched, total = reporting.differing(result)
    return f"{mismatched:,} of {total:,} differ, {result['seconds']:.1f} s"


def measure(
    side: str,
    rows: Sequence[Row],
    options: Sequence[str],
    progress: Progress,
    engine: Sequence[str] = ENGINE,
    label: str | None = None,
) -> tuple[dict[str, dict[str, Any]], str]:
    """Results of one side by row, and the version of Megatron that ran.

    Args:
        options: of the engine, without its rows.
        label: what progress calls the side.
    """
    label = label or side
    results: dict[str, dict[str, Any]] = {}
    version = "unknown"
    begun: set[str] = set()
    wanted = {row.name for row in rows}
    told = events(side, [*options, "--rows", *(row.name for row in rows)], engine)
    try:
        for event in told:
            if event["event"] == "start":
                version = event["megatron"]
                continue
            name = event["row"]
            if event["event"] == "step":
                if isinstance(progress, RowProgress) and name in begun:
                    progress.step(f"{label}: {name}", event["done"], event["steps"])
                continue
            if event["event"] == "begin":
                if name not in begun:
                    begun.add(name)
                    progress.begin(f"{label}: {name}")
                continue
            result = result_of(event)
            if name in wanted:
                results[name] = result
            if name in begun:
                begun.remove(name)
                progress.end(f"{label}: {name}", _summary(result) if result.get("columns") else "done")
    except EngineFailure as failure:
        for row in rows:
            results.setdefault(row.name, {"ran": False, "why": str(failure), "failed": True})
    finally:
        told.close()
    return results, version


def gpus() -> int:
    """How many GPUs torch sees, without touching one."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def sides_here(device: str, te_sources: Path, upstream: bool) -> list[str]:
    """Which sides can be measured here; ours comes last."""
    sides = []
    if upstream:
        sides.append("upstream")
        if device == "cpu" and (te_sources / "transformer_engine").is_dir():
            sides.append("ring")
        if device == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
            sides.append("te")
    return [*sides, reporting.OURS]


def environment(
    device: str, megatron: str, count: int, rows: Sequence[Row], te_sources: Path
) -> dict[str, Any]:
    """What the figures depend on."""
    found: dict[str, Any] = {"device": "CPU, one thread a rank", "python": platform.python_version()}
    transport = "Ranks are processes of this machine's CPU; bytes go over gloo."
    if device == "cuda":
        import torch

        found["device"] = f"{count} x {torch.cuda.get_device_name(0)}"
        shared = [row.name for row in rows if row.ranks > count]
        transport = "Every rank has a GPU of its own; bytes go over NCCL or RCCL."
        if shared:
            transport = (
                f"{count} GPU{'s' * (count > 1)}: in {', '.join(shared)} several ranks share a GPU; kernels run there, "
                "bytes go over gloo through the host's memory. Which transport moves bytes cannot change a bit, but no "
                "figure of time or memory here is one of a sharded job."
            )
    found["transport"] = transport
    found["megatron-core"] = megatron
    for distribution in ("torch", "triton", "transformer-engine", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[distribution] = importlib.metadata.version(distribution)
    if device == "cpu":
        found["transformer-engine sources"] = (
            ", ".join(
                info.name.removesuffix(".dist-info").partition("-")[2]
                for info in te_sources.glob("transformer_engine-*.dist-info")
            )
            or "none"
        )
    return {**found, "machine": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count() or 0}


def shape_from(args: argparse.Namespace, device: str) -> Shape:
    """The shape that was named, with the numbers that were given."""
    shape = SHAPES[args.shape or DEFAULT_SHAPE[device]]
    given = {
        name: getattr(args, name)
        for name in ("layers", "sequence", "batch", "vocabulary")
        if getattr(args, name) is not None
    }
    return replace(shape, **given)


def run(args: argparse.Namespace, engine: Sequence[str] = ENGINE) -> int:
    """Measure and report; the exit status: 0 equal, 1 a mismatch, 2 it could not run."""
    start = time.monotonic()
    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json == "-")
    count = gpus() if args.device != "cpu" else 0
    device = args.device or ("cuda" if count else "cpu")
    if device == "cuda" and not count:
        console.print(
            "--device cuda was asked for, torch sees no GPU: use --device cpu, or a machine with one."
        )
        return 2
    shape = shape_from(args, device)
    try:
        rows = selected(args.rows, args.ranks or (8 if device == "cpu" else max(4, count)))
    except ValueError as error:
        console.print(str(error), style="bold red", markup=False)
        return 2
    sides = sides_here(device, args.te_sources, not args.no_upstream)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    todo: dict[str, list[Row]] = {}
    for side in sides:
        reasons = {row.name: why_not(row, side, shape, device, count) for row in rows}
        results[side] = {
            # Asked for by name and impossible is a failure of ours, not a remark.
            name: {"ran": False, "why": why, "failed": bool(args.rows) and side == reporting.OURS}
            for name, why in reasons.items()
            if why
        }
        todo[side] = [row for row in rows if not reasons[row.name]]
    options = ["--device", device, "--dtype", args.dtype, "--shape", json.dumps(asdict(shape))]
    options += ["--te-sources", str(args.te_sources)]
    version = "unknown"
    total = sum(len(some) + 1 for some in todo.values() if some)
    with RowProgress("rows", total, console) as progress:
        for side in sides:
            if todo[side]:
                found, version = measure(side, todo[side], options, progress, engine)
                results[side].update(found)
    place = environment(device, version, count, rows, args.te_sources)
    place["seconds"] = round(time.monotonic() - start, 1)
    report = {
        "schema": reporting.SCHEMA,
        "environment": place,
        "shape": asdict(shape),
        "dtype": args.dtype,
        "sides": sides,
        "rows": [
            {
                "name": row.name,
                "ranks": row.ranks,
                "results": {side: results[side][row.name] for side in sides},
            }
            for row in rows
        ],
    }
    reporting.write(report, args.out, console)
    write_json(args.json, report)
    return reporting.exit_status(report)
