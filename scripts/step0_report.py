"""Turns the quick start's rows into out/step0.json, out/step0.md, out/step0.png and a table on the terminal.

A report that drops or misreads a row looks as good as one that does not, so the input is checked key by key: a
missing or unknown key, a part that does not add up, or a number that is none stops the report and is named. What
upstream could not run is shown with its reason, never left blank, and no figure in here is written by hand.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_plugins.verify.model.plan import COLUMNS
from megatron_plugins.verify.tables import print_table

MODEL_PARTS = COLUMNS
# What a row about single functions of upstream may compare instead.
FUNCTION_PARTS = ("lse", "out")
UPSTREAM_COLOR, DETERMINISTIC_COLOR = "#c2410c", "#0e7490"


class ReportError(ValueError):
    """The rows are not what the report takes; the message names the row, the key and what is expected."""


@dataclass(frozen=True)
class Result:
    """One comparison with the unsharded run: `mismatched` of `total` elements have other bits.

    `parts` maps a compared tensor to its share [mismatched, total]; the parts add up to the whole.
    `max_abs_logprob` is None where no log-probabilities are compared. `what` says what ran, where it needs saying.
    """

    mismatched: int
    total: int
    max_abs_logprob: float | None
    seconds: float
    parts: dict[str, list[int]]
    what: str | None = None

    @property
    def share(self) -> float:
        return self.mismatched / self.total

    def count(self) -> str:
        """For people: "12 of 4,096 (0.29%)"; never rounded to 0% when something differs."""
        if self.mismatched == 0:
            return f"0 of {self.total:,}"
        percent = 100 * self.share
        return f"{self.mismatched:,} of {self.total:,} ({'<0.01' if percent < 0.01 else f'{percent:.3g}'}%)"

    def delta(self) -> str:
        if self.max_abs_logprob is None:
            return "-"
        return "0" if self.max_abs_logprob == 0 else f"{self.max_abs_logprob:.2e}"


@dataclass(frozen=True)
class Row:
    """One layout, dtype and number of micro-batches: upstream's figure beside ours."""

    name: str
    dtype: str
    micro_batches: int
    deterministic: Result
    upstream: Result | None
    upstream_why_absent: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name} · {self.dtype} · {self.micro_batches} mb"


@dataclass(frozen=True)
class Report:
    """Everything that is shown: where it ran and one row per comparison."""

    environment: dict[str, str | int | float]
    rows: list[Row]

    def failures(self) -> list[Row]:
        """Rows in which a deterministic run has a mismatch; the quick start's exit status is 1 if there is one."""
        return [row for row in self.rows if row.deterministic.mismatched]


def environment(device: str) -> dict[str, str | int | float]:
    """What the figures depend on. `device` says where the arithmetic ran, e.g. "CPU (gloo, one thread a rank)"."""
    found: dict[str, str | int | float] = {"device": device, "python": platform.python_version()}
    for distribution in ("torch", "megatron-core", "transformer-engine", "triton", "numpy"):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[distribution] = "not installed"
    return {**found, "machine": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count() or 0}


def _keys(where: str, given: Any, required: Iterable[str], optional: Iterable[str] = ()) -> None:
    if not isinstance(given, Mapping):
        raise ReportError(f"{where}: expected a mapping, got {type(given).__name__}")
    known = [*required, *optional]
    for key in required:
        if key not in given:
            raise ReportError(f"{where}: missing key {key!r}")
    for key in given:
        if key not in known:
            raise ReportError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def _number(where: str, value: Any, kind: type) -> Any:
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not math.isfinite(value) or value < 0:
        raise ReportError(f"{where}: expected a finite {kind.__name__} of 0 or more, got {value!r}")
    return kind(value)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ReportError(f"{where}: expected a text that is not empty, got {value!r}")
    return value


def _parts(where: str, given: Any) -> dict[str, list[int]]:
    _keys(where, given, (), (*MODEL_PARTS, *FUNCTION_PARTS))
    parts = {}
    for name, pair in given.items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ReportError(f"{where}.{name}: expected [mismatched, total], got {pair!r}")
        parts[name] = [_number(f"{where}.{name}", value, int) for value in pair]
    return parts


def _result(where: str, given: Any, what_required: bool) -> Result:
    required = ("mismatched", "total", "max_abs_logprob", "seconds", "parts")
    _keys(
        where, given, (*required, "what") if what_required else required, () if what_required else ("what",)
    )
    parts = _parts(f"{where}.parts", given["parts"])
    if not parts:
        raise ReportError(f"{where}.parts: names nothing that was compared")
    if not what_required and not parts.keys().isdisjoint(MODEL_PARTS):
        _keys(f"{where}.parts", parts, MODEL_PARTS, FUNCTION_PARTS)
    delta = given["max_abs_logprob"]
    what = given.get("what")
    result = Result(
        mismatched=_number(f"{where}.mismatched", given["mismatched"], int),
        total=_number(f"{where}.total", given["total"], int),
        max_abs_logprob=None if delta is None else _number(f"{where}.max_abs_logprob", delta, float),
        seconds=_number(f"{where}.seconds", given["seconds"], float),
        parts=parts,
        what=None if what is None else _text(f"{where}.what", what),
    )
    for index, key in enumerate(("mismatched", "total")):
        added = sum(part[index] for part in parts.values())
        if added != getattr(result, key):
            raise ReportError(f"{where}.{key}: is {getattr(result, key)}, its parts add up to {added}")
    if result.total == 0 or result.mismatched > result.total:
        raise ReportError(f"{where}: {result.mismatched} mismatched of {result.total} compared elements")
    return result


def _row(where: str, given: Any) -> Row:
    required = ("name", "dtype", "micro_batches", "upstream", "deterministic")
    _keys(where, given, required, ("upstream_why_absent",))
    where = f"{where} ({given['name']})"
    why, upstream = given.get("upstream_why_absent"), given["upstream"]
    if upstream is None and not why:
        raise ReportError(f"{where}: upstream is null and upstream_why_absent does not say why")
    if upstream is not None and why:
        raise ReportError(f"{where}: upstream has a result and upstream_why_absent a reason; keep one")
    return Row(
        name=_text(f"{where}.name", given["name"]),
        dtype=_text(f"{where}.dtype", given["dtype"]),
        micro_batches=_number(f"{where}.micro_batches", given["micro_batches"], int),
        deterministic=_result(f"{where}.deterministic", given["deterministic"], what_required=False),
        upstream=None if upstream is None else _result(f"{where}.upstream", upstream, what_required=True),
        upstream_why_absent=_text(f"{where}.upstream_why_absent", why) if why else None,
    )


def checked(given: Any) -> Report:
    """Check the quick start's result key by key.

    Args:
        given: {"environment": {name: text or number}, "rows": [row, …]}; a row has name, dtype, micro_batches,
            deterministic, and upstream or (upstream null and) upstream_why_absent.

    Raises:
        ReportError: a key is missing or unknown, a value is of the wrong kind, parts do not add up to their whole,
            or two rows are the same.
    """
    _keys("report", given, ("environment", "rows"))
    _keys("environment", given["environment"], (), given["environment"])
    for key, value in given["environment"].items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ReportError(f"environment.{key}: expected a text or a number, got {value!r}")
    if not isinstance(given["rows"], Sequence) or not given["rows"]:
        raise ReportError("rows: expected a list that is not empty")
    rows = [_row(f"rows[{index}]", row) for index, row in enumerate(given["rows"])]
    seen: set[str] = set()
    for row in rows:
        if row.label in seen:
            raise ReportError(f"rows: {row.label} is there twice")
        seen.add(row.label)
    return Report(dict(given["environment"]), rows)


def verdict(report: Report) -> str:
    """One sentence: what the rows add up to."""
    failures = report.failures()
    rows = f"{len(report.rows)} rows"
    upstream = [row for row in report.rows if row.upstream is not None]
    differ = sum(row.upstream.mismatched > 0 for row in upstream if row.upstream is not None)
    other = f"upstream differs in {differ} of the {len(upstream)} that have its figure"
    if failures:
        return f"FAILED: deterministic runs differ in {len(failures)} of {rows} ({failures[0].label} first); {other}."
    return f"Deterministic: 0 mismatched elements in all {rows}; {other}."


def table(report: Report) -> Table:
    """The rows as a rich table that fits 80 columns: one section per dtype and number of micro-batches."""
    out = Table(
        title="Elements whose bits differ from the unsharded run",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )
    out.add_column("layout", no_wrap=True)
    for heading in ("compared", "upstream", "|Δ logp|", "ours", "|Δ logp|", "s"):
        out.add_column(heading, justify="right", no_wrap=True)
    group = None
    for row in report.rows:
        if group != (row.dtype, row.micro_batches):
            group = (row.dtype, row.micro_batches)
            out.add_section()
            out.add_row(
                f"[bold]{row.dtype}, {row.micro_batches} micro-batch{'es' * (row.micro_batches > 1)}[/]"
            )
        upstream, ours = row.upstream, row.deterministic
        good = "green" if ours.mismatched == 0 else "bold red"
        out.add_row(
            f"  {row.name}",
            f"{ours.total:,}",
            *(("no figure", "") if upstream is None else (f"{upstream.mismatched:,}", upstream.delta())),
            f"[{good}]{ours.mismatched:,}[/]",
            f"[{good}]{ours.delta()}[/]",
            f"{ours.seconds:.1f}",
        )
    return out


def markdown(report: Report) -> str:
    """The report as Markdown: verdict, rows, why upstream is absent where it is, and the machine."""
    lines = ["# Step 0: the same weights and tokens, other layouts", "", verdict(report), ""]
    lines += ["![Mismatches and log-probability differences per row](step0.png)", ""]
    lines += [
        "| layout | dtype | micro-batches | upstream differs | max abs Δ log-prob | deterministic differs "
        "| max abs Δ log-prob | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report.rows:
        upstream, ours = row.upstream, row.deterministic
        theirs = "no figure | - " if upstream is None else f"{upstream.count()} | {upstream.delta()}"
        lines.append(
            f"| {row.name} | {row.dtype} | {row.micro_batches} | {theirs} "
            f"| {ours.count()} | {ours.delta()} | {ours.seconds:.1f} |"
        )
    lines += ["", "Deterministic, part by part (mismatched of compared elements):", ""]
    lines += [
        f"- {row.label}: "
        + ", ".join(f"{name} {part[0]:,} of {part[1]:,}" for name, part in row.deterministic.parts.items())
        for row in report.rows
    ]
    said = {row.upstream.what: None for row in report.rows if row.upstream is not None}
    lines += ["", "What upstream's figures are:", "", *(f"- {what}" for what in said)]
    absent: dict[str, list[str]] = {}
    for row in report.rows:
        if row.upstream_why_absent:
            absent.setdefault(row.upstream_why_absent, []).append(row.label)
    if absent:
        lines += ["", "Where upstream has no figure:", ""]
        lines += [f"- {', '.join(labels)}: {why}" for why, labels in absent.items()]
    lines += ["", "| environment | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in report.environment.items()]
    return "\n".join(lines) + "\n"


def _draw_panel(
    axes: Any, rows: list[Row], values: list[tuple[float | None, float | None]], title: str
) -> None:
    """One dot per row for upstream and ours on a log axis, with a lane of its own for exact zeros."""
    positive = [value for pair in values for value in pair if value]
    low = 10.0 ** (math.floor(math.log10(min(positive))) if positive else -6)
    high = 10.0 ** (math.ceil(math.log10(max(positive))) if positive else 0)
    high = max(high, low * 10)
    zero = low / 10
    for index, (theirs, ours) in enumerate(values):
        y = len(rows) - 1 - index
        before = rows[max(index - 1, 0)]
        if (before.dtype, before.micro_batches) != (rows[index].dtype, rows[index].micro_batches):
            axes.axhline(y + 0.5, color="#d4d4d4", linewidth=0.8)
        if rows[index].upstream is None:
            axes.text(low * 1.3, y, "upstream: no figure", va="center", fontsize=7.5, color="#8a8a8a")
        if theirs is not None and ours is not None:
            axes.plot([ours or zero, theirs or zero], [y, y], color="#d4d4d4", linewidth=1.5, zorder=1)
        if theirs is not None:
            axes.plot(theirs or zero, y, "o", color=UPSTREAM_COLOR, markersize=8.5, zorder=2)
        if ours is not None:
            axes.plot(ours or zero, y, "s", color=DETERMINISTIC_COLOR, markersize=4.5, zorder=3)
    axes.set_xscale("log")
    axes.set_xlim(zero / 2.5, high * 2)
    axes.axvspan(zero / 2.5, zero * 2.5, color="#ecfeff", zorder=0)
    decades = list(range(round(math.log10(low)), round(math.log10(high)) + 1))
    step = max(1, math.ceil(len(decades) / 6))
    shown = decades[::step]
    axes.set_xticks([zero, *(10.0**decade for decade in shown)])
    axes.set_xticklabels(["exactly 0", *(f"$10^{{{decade}}}$" for decade in shown)])
    axes.minorticks_off()
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=11, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw(report: Report, path: Path) -> None:
    """Plot the mismatched share and max |Δ log-prob| of every row, upstream against ours, log scale, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    rows = report.rows
    height = 1.7 + 0.27 * len(rows)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, height), sharey=True)
    shares = [(row.upstream.share if row.upstream else None, row.deterministic.share) for row in rows]
    deltas = [
        (row.upstream.max_abs_logprob if row.upstream else None, row.deterministic.max_abs_logprob)
        for row in rows
    ]
    _draw_panel(left, rows, shares, "share of elements whose bits differ")
    _draw_panel(right, rows, deltas, "max |Δ log-prob|")
    left.set_yticks(range(len(rows)))
    left.set_yticklabels([row.label for row in reversed(rows)], fontsize=9)
    left.set_ylim(-0.7, len(rows) - 0.3)
    marks = [
        Line2D([], [], marker="o", linestyle="", color=UPSTREAM_COLOR, markersize=8.5, label="upstream"),
        Line2D(
            [], [], marker="s", linestyle="", color=DETERMINISTIC_COLOR, markersize=4.5, label="deterministic"
        ),
    ]
    device = report.environment.get("device", "device not named")
    figure.suptitle(
        "Same weights, same tokens, other layout: what differs from the unsharded run",
        x=0.01,
        y=1 - 0.12 / height,
        va="top",
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    figure.legend(
        handles=marks, loc="upper right", ncols=2, frameon=False, bbox_to_anchor=(0.995, 1 - 0.08 / height)
    )
    figure.text(0.01, 0.1 / height, f"Measured on: {device}", fontsize=8.5, color="#525252")
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1 - 0.3 / height))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(given: Any, folder: Path, console: Console | None = None) -> Report:
    """Check `given`, write step0.json, step0.md and step0.png into `folder`, and print the table.

    Raises:
        ReportError: as for `checked`; nothing is written then.
    """
    report = checked(given)
    console = console or Console()
    folder.mkdir(parents=True, exist_ok=True)
    content = {"environment": report.environment, "rows": [asdict(row) for row in report.rows]}
    (folder / "step0.json").write_text(
        json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "step0.md").write_text(markdown(report), encoding="utf-8")
    draw(report, folder / "step0.png")
    print_table(console, table(report))
    why = {row.upstream_why_absent: None for row in report.rows if row.upstream_why_absent}
    for reason in why:
        console.print(f"no upstream figure: {reason}", style="dim", markup=False)
    console.print(verdict(report), style="bold red" if report.failures() else "bold green", markup=False)
    console.print(f"written: {folder / 'step0.json'}, step0.md, step0.png", markup=False, soft_wrap=True)
    return report
