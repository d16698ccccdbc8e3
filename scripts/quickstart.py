"""Shows the fault and its absence: one small Megatron GPT in several parallel layouts, upstream beside deterministic.

Every layout loads the same checkpoint and sees the same tokens (bytes of this repository's documentation). Each is
compared, bit by bit, with the unsharded run of its own side: logits, log-probabilities, loss and every gradient,
after one and after three micro-batches. Exit status 1 when a deterministic element differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

import step0_report
from step0_plan import DTYPES, ROOT, UPSTREAM_ABSENT, tasks

HERE = Path(__file__).resolve().parent


class EngineFailure(RuntimeError):
    """A measuring process ended before it had measured everything."""


def _events(*command: str) -> Iterator[dict[str, Any]]:
    """JSON lines of a measuring process; whatever else it prints is shown only if it fails."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=HERE,
    )
    assert process.stdout is not None
    chatter: list[str] = []
    for line in process.stdout:
        if line.startswith('{"event"'):
            event = json.loads(line)
            if event["event"] == "error":
                process.kill()
                raise EngineFailure(f"{event['mode']}, layout {event['task']['name']}:\n{event['message']}")
            yield event
        else:
            chatter.append(line)
    if process.wait():
        raise EngineFailure(
            f"{' '.join(command)} ended with status {process.returncode}:\n{''.join(chatter[-40:])}"
        )


def _key(task: dict[str, Any], micro_batches: int) -> tuple[str, str, int]:
    return task["name"], task["dtype"], micro_batches


MODES = ("upstream", "ring", "deterministic")
LSE = "upstream: LSE correction after nine shapes"


def _selected(mode: str, only: list[str]) -> list[str]:
    return [
        f"{mode}: {task.name} {task.dtype}" for task in tasks(mode) if not only or task.name in (*only, "TP1")
    ]


def measure(
    te_sources: Path, only: list[str], progress: step0_report.Progress
) -> tuple[dict[Any, Any], dict[Any, Any], dict[str, Any]]:
    """Rows of both sides by (name, dtype, micro-batches), and the LSE figure."""
    sides: dict[str, dict[Any, Any]] = {"upstream": {}, "deterministic": {}}
    selection = [word for name in only for word in ("--only", name)]
    for mode in MODES:
        for event in _events("step0_engine.py", mode, "--te-sources", str(te_sources), *selection):
            label = f"{mode}: {event['task']['name']} {event['task']['dtype']}"
            if event["event"] == "begin":
                progress.begin(label)
                continue
            side = "deterministic" if mode == "deterministic" else "upstream"
            result = {**event["result"], "seconds": event["seconds"]}
            sides[side].setdefault(_key(event["task"], event["micro_batches"]), result)
            if event["micro_batches"] == 1:
                progress.end(
                    label, f"{result['mismatched']:,} of {result['total']:,} differ, {event['seconds']:.1f} s"
                )
    progress.begin(LSE)
    (lse,) = _events("step0_lse.py", "--te-sources", str(te_sources))
    progress.end(LSE, f"{lse['mismatched']:,} of {lse['total']:,} differ, {lse['seconds']:.1f} s")
    return sides["upstream"], sides["deterministic"], lse


def build_rows(
    upstream: dict[Any, Any], deterministic: dict[Any, Any], lse: dict[str, Any]
) -> list[dict[str, Any]]:
    """Report rows: every deterministic one, upstream's own figure beside it where upstream can run the layout."""
    rows = []
    for (name, dtype, micro_batches), ours in sorted(deterministic.items(), key=lambda kv: _order(kv[0])):
        if name == "TP1":
            continue
        theirs = upstream.get((name, dtype, micro_batches))
        row: dict[str, Any] = {"name": name, "dtype": dtype, "micro_batches": micro_batches}
        if theirs is not None:
            what = (
                "TransformerEngine ring, CP against CP=1"
                if name.startswith("CP")
                else "local spec, TP against TP=1"
            )
            row["upstream"] = {**theirs, "what": what}
        elif name == "reference vs actor" and (dtype, micro_batches) == ("fp32", 1):
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
            row["upstream"] = None
            row["upstream_why_absent"] = UPSTREAM_ABSENT[name]
        row["deterministic"] = ours
        rows.append(row)
    return rows


def _order(key: tuple[str, str, int]) -> tuple[int, int, int]:
    names = [task.name for task in tasks("deterministic")]
    return DTYPES.index(key[1]), key[2], names.index(key[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out", help="folder of step0.json, step0.md and step0.png"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LAYOUT", help="measure only these layouts"
    )
    parser.add_argument("--te-sources", type=Path, default=ROOT / ".venv" / "transformer-engine-sources")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    args = parser.parse_args()
    known = {task.name for task in tasks("deterministic")} - {"TP1"}
    if unknown := set(args.only) - known:
        parser.error(f"unknown layout {sorted(unknown)}; known: {sorted(known)}")
    start = time.monotonic()
    # With --json the report alone goes to standard output.
    console = Console(stderr=args.json)
    try:
        total = sum(len(_selected(mode, args.only)) for mode in MODES) + 1
        with step0_report.Progress("layouts", total, console) as progress:
            upstream, deterministic, lse = measure(args.te_sources, args.only, progress)
    except EngineFailure as failure:
        print(f"The measurement did not finish.\n{failure}", file=sys.stderr)
        raise SystemExit(2) from failure
    environment = step0_report.environment("CPU (gloo, one thread a rank)")
    environment["transformer-engine"] = _sources_version(args.te_sources)
    environment["seconds"] = round(time.monotonic() - start, 1)
    rows = build_rows(upstream, deterministic, lse)
    report = step0_report.write({"environment": environment, "rows": rows}, args.out, console)
    if args.json:
        print((args.out / "step0.json").read_text())
    raise SystemExit(1 if report.failures() else 0)


def _sources_version(sources: Path) -> str:
    """Version of the unpacked TransformerEngine sources, from the .dist-info beside them."""
    found = [
        info.name.removesuffix(".dist-info").partition("-")[2]
        for info in sources.glob("transformer_engine-*.dist-info")
    ]
    return f"{found[0]} (sources)" if found else "unknown (sources)"


if __name__ == "__main__":
    main()
