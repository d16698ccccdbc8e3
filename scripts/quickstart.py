"""Shows the fault and its absence: one small Megatron GPT in several parallel layouts, upstream beside deterministic.

Every layout has the same weights and sees the same tokens. Each is compared, bit by bit, with the run on one rank of
its own side: logits, log-probabilities, loss and every gradient after three micro-batches, gradient norms, and the
weights after three steps. Exit status 1 when a deterministic element differs. The runs are those of
``python -m megatron_plugins.verify model``, which has more rows and runs on a GPU as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import step0_report  # noqa: E402
from megatron_plugins.verify.interrupts import run_until_interrupted  # noqa: E402
from megatron_plugins.verify.model import command  # noqa: E402
from megatron_plugins.verify.model.plan import SHAPES, Row, selected, why_not  # noqa: E402
from megatron_plugins.verify.outputs import add_json, write_json  # noqa: E402
from megatron_plugins.verify.progress import Progress  # noqa: E402

DTYPES = ("bf16", "fp32")
LAYOUTS = ["reference vs actor", "TP2", "TP4", "TP2+SP", "CP2", "CP4", "TP2xCP2+SP"]
SHAPE = SHAPES["small"]
LSE = "upstream: LSE correction after nine shapes"
ACTOR_UPSTREAM = "measured once, on the LSE correction: see fp32"


class EngineFailure(RuntimeError):
    """A measuring process ended before it had measured everything."""


def lse_figure(te_sources: Path) -> dict[str, Any]:
    """Upstream's LSE correction of the same operands before and after nine shapes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "step0_lse.py"), "--te-sources", str(te_sources)],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"event"'):
            return dict(json.loads(line))
    raise EngineFailure(f"step0_lse.py ended with status {done.returncode}:\n{done.stderr[-3000:]}")


def rows_of(side: str, layouts: list[str]) -> list[Row]:
    """What a side measures: ours everything, upstream what it can run and what is not one rank against itself."""
    return [
        row
        for row in selected(layouts, 8)
        if why_not(row, side, SHAPE, "cpu", 0) is None and (side == "deterministic" or row.kind == "layout")
    ]


def measure(
    te_sources: Path, layouts: list[str], progress: Progress
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Results of both sides by (layout, dtype): upstream's with what was run, from its local spec or the ring.

    Raises:
        EngineFailure: a row of ours failed, or upstream's baseline.
    """
    upstream: dict[Any, Any] = {}
    ours: dict[Any, Any] = {}
    options = ["--device", "cpu", "--shape", json.dumps(asdict(SHAPE)), "--te-sources", str(te_sources)]
    for dtype in DTYPES:
        for side in ("upstream", "ring", "deterministic"):
            rows = rows_of(side, layouts)
            if not rows:
                continue
            results, _ = command.measure(
                side, rows, [*options, "--dtype", dtype], progress, label=f"{side} {dtype}"
            )
            for name, result in results.items():
                if not result["ran"]:
                    raise EngineFailure(f"{side}, layout {name} {dtype}:\n{result['why']}")
                (ours if side == "deterministic" else upstream)[name, dtype] = _row_result(result)
    return upstream, ours


def _row_result(result: dict[str, Any]) -> dict[str, Any]:
    """A result as the report takes it."""
    columns = result["columns"]
    return {
        "mismatched": sum(column["mismatched"] for column in columns.values()),
        "total": sum(column["total"] for column in columns.values()),
        "max_abs_logprob": columns["log-probs"]["max_abs"],
        "seconds": result["seconds"],
        "parts": {name: [column["mismatched"], column["total"]] for name, column in columns.items()},
    }


def build_rows(
    upstream: dict[Any, Any], ours: dict[Any, Any], lse: dict[str, Any], layouts: list[str]
) -> list[dict[str, Any]]:
    """Report rows: every deterministic one, upstream's own figure beside it where upstream can run the layout."""
    rows = []
    for dtype in DTYPES:
        for name in layouts:
            row: dict[str, Any] = {"name": name, "dtype": dtype, "micro_batches": SHAPE.micro_batches}
            theirs = upstream.get((name, dtype))
            if theirs is not None:
                ring = name.startswith("CP")
                what = "TransformerEngine ring, CP against CP=1" if ring else "local spec, TP against TP=1"
                row["upstream"] = {**theirs, "what": what}
            elif name == "reference vs actor" and dtype == "fp32":
                row["upstream"] = {
                    "mismatched": lse["mismatched"],
                    "total": lse["total"],
                    "max_abs_logprob": None,
                    "seconds": lse["seconds"],
                    "what": "TransformerEngine's LSE correction, same operands before and after nine shapes "
                    f"(max abs {lse['max_abs']:.1e})",
                    "parts": {"lse": [lse["mismatched"], lse["total"]]},
                }
            else:
                (plan,) = selected([name], 8)
                row["upstream"] = None
                row["upstream_why_absent"] = (
                    why_not(plan, "ring", SHAPE, "cpu", 0) if plan.sp else ACTOR_UPSTREAM
                )
            row["deterministic"] = ours[name, dtype]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out", help="folder of step0.json, step0.md and step0.png"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LAYOUT", help="measure only these layouts"
    )
    parser.add_argument("--te-sources", type=Path, default=ROOT / ".venv" / "transformer-engine-sources")
    add_json(parser)
    args = parser.parse_args()
    if unknown := set(args.only) - set(LAYOUTS):
        parser.error(f"unknown layout {sorted(unknown)}; known: {sorted(LAYOUTS)}")
    raise SystemExit(run_until_interrupted(run, args))


def run(args: argparse.Namespace) -> int:
    """Measure and report; the exit status: 0 equal, 1 a mismatch of ours, 2 it did not finish."""
    layouts = [name for name in LAYOUTS if not args.only or name in args.only]
    start = time.monotonic()
    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json == "-")
    try:
        sides = [rows_of(side, layouts) for side in ("upstream", "ring", "deterministic")]
        total = len(DTYPES) * sum(len(rows) + 1 for rows in sides if rows) + 1
        with Progress("layouts", total, console) as progress:
            upstream, ours = measure(args.te_sources, layouts, progress)
            progress.begin(LSE)
            lse = lse_figure(args.te_sources)
            progress.end(LSE, f"{lse['mismatched']:,} of {lse['total']:,} differ, {lse['seconds']:.1f} s")
    except EngineFailure as failure:
        print(f"The measurement did not finish.\n{failure}", file=sys.stderr)
        return 2
    environment = step0_report.environment("CPU (gloo, one thread a rank)")
    environment["transformer-engine"] = _sources_version(args.te_sources)
    environment["seconds"] = round(time.monotonic() - start, 1)
    rows = build_rows(upstream, ours, lse, layouts)
    report = step0_report.write({"environment": environment, "rows": rows}, args.out, console)
    write_json(args.json, json.loads((args.out / "step0.json").read_text()))
    return 1 if report.failures() else 0


def _sources_version(sources: Path) -> str:
    """Version of the unpacked TransformerEngine sources, from the .dist-info beside them."""
    found = [
        info.name.removesuffix(".dist-info").partition("-")[2]
        for info in sources.glob("transformer_engine-*.dist-info")
    ]
    return f"{found[0]} (sources)" if found else "unknown (sources)"


if __name__ == "__main__":
    main()
