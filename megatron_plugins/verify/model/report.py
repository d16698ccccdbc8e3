"""Turns the events of the engines into verify-model.json, .md, .png and a table on the terminal.

A report that drops or misreads a row looks as good as one that does not, so a result is checked key by key before
anything is written, and what did not run is shown with its reason. A mismatch on our side is a failure; upstream's
figures stand beside it to say what the same rows look like without us.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_plugins.verify.model.plan import BY_NAME, COLUMNS, SIDES
from megatron_plugins.verify.tables import print_table

SCHEMA = "deterministic-rocm/verify-model/1"
OURS = "deterministic"
SIDE_NAMES = {
    "upstream": "Megatron, local spec",
    "te": "Megatron, TransformerEngine spec",
    "ring": "Megatron, local spec with TransformerEngine's ring",
    OURS: "deterministic",
}


class ReportError(ValueError):
    """The result is not what the report takes; the message names the key and what is expected."""


def _require(condition: bool, where: str, expected: str, found: Any) -> None:
    if not condition:
        raise ReportError(f"{where}: expected {expected}, found {found!r}")


def _keys(where: str, given: Any, required: Iterable[str]) -> None:
    _require(isinstance(given, Mapping), where, "a mapping", given)
    required = set(required)
    _require(set(given) == required, where, f"the keys {sorted(required)}", sorted(given))


def _check_result(where: str, given: Any, columns: Iterable[str]) -> None:
    _require(isinstance(given, Mapping) and "ran" in given, where, "a mapping with 'ran'", given)
    if not given["ran"]:
        _keys(where, given, ("ran", "why", "failed"))
        _require(bool(given["why"]), f"{where}.why", "a reason", given["why"])
        return
    _keys(where, given, ("ran", "columns", "seconds", "peak_bytes"))
    _keys(f"{where}.columns", given["columns"], columns)
    for name, column in given["columns"].items():
        at = f"{where}.columns.{name}"
        _keys(at, column, ("mismatched", "total", "first", "max_abs"))
        mismatched, total = column["mismatched"], column["total"]
        _require(isinstance(total, int) and total > 0, f"{at}.total", "a positive number", total)
        _require(
            isinstance(mismatched, int) and 0 <= mismatched <= total,
            f"{at}.mismatched",
            f"0 … {total}",
            mismatched,
        )
        _require(
            (column["first"] is None) == (mismatched == 0),
            f"{at}.first",
            "an index iff anything differs",
            column,
        )
        # A difference of NaN or infinity has no largest value; null says so.
        largest = column["max_abs"]
        _require(
            largest is None or math.isfinite(largest), f"{at}.max_abs", "a finite number or null", largest
        )


def check(report: Any) -> None:
    """Check a result key by key.

    Raises:
        ReportError: a key is missing or unknown, a row is unknown or there twice, a count is none.
    """
    _keys("report", report, ("schema", "environment", "shape", "dtype", "sides", "rows"))
    _require(report["schema"] == SCHEMA, "schema", SCHEMA, report["schema"])
    sides = report["sides"]
    _require(OURS in sides and set(sides) <= set(SIDES), "sides", f"'{OURS}' and some of {SIDES}", sides)
    _require(bool(report["rows"]), "rows", "at least one", report["rows"])
    seen = set()
    for index, row in enumerate(report["rows"]):
        _keys(f"rows[{index}]", row, ("name", "ranks", "results"))
        name = row["name"]
        _require(name in BY_NAME and name not in seen, f"rows[{index}].name", "a row's name, once", name)
        seen.add(name)
        _keys(f"{name}.results", row["results"], sides)
        for side, result in row["results"].items():
            _check_result(f"{name}.results.{side}", result, BY_NAME[name].columns)


def differing(result: Mapping[str, Any]) -> tuple[int, int]:
    """Mismatched and compared elements of a row over all its columns."""
    columns = result["columns"].values()
    return sum(c["mismatched"] for c in columns), sum(c["total"] for c in columns)


def exit_status(report: Mapping[str, Any]) -> int:
    """1: one of our rows differs. 2: none does, but one failed or none ran. 0: all that can run here are equal."""
    ours = [row["results"][OURS] for row in report["rows"]]
    if any(result["ran"] and differing(result)[0] for result in ours):
        return 1
    if any(result.get("failed") for result in ours) or not any(result["ran"] for result in ours):
        return 2
    return 0


def verdict(report: Mapping[str, Any]) -> str:
    """One sentence: what the rows add up to."""
    ours = {row["name"]: row["results"][OURS] for row in report["rows"]}
    ran = {name: result for name, result in ours.items() if result["ran"]}
    bad = [name for name, result in ran.items() if differing(result)[0]]
    failed = [name for name, result in ours.items() if result.get("failed")]
    idle = [name for name, result in ours.items() if not result["ran"] and not result["failed"]]
    elements = sum(differing(result)[1] for result in ran.values())
    theirs = [
        result
        for row in report["rows"]
        for side, result in row["results"].items()
        if side != OURS and result["ran"]
    ]
    beside = (
        f"; upstream differs in {sum(differing(r)[0] > 0 for r in theirs)} of {len(theirs)} figures"
        if theirs
        else ""
    )
    if bad:
        broken = f"; failed to run: {', '.join(failed)}" if failed else ""
        return (
            f"FAILED: {len(bad)} of {len(ran)} rows differ from one rank ({', '.join(bad)}){broken}{beside}."
        )
    if failed:
        return f"FAILED TO RUN: {', '.join(failed)}; the other {len(ran)} rows have 0 mismatches."
    if not ran:
        return f"NOTHING RAN: {', '.join(idle)}."
    also = f"; not run here: {', '.join(idle)}" if idle else ""
    return f"Equal bits: 0 of {elements:,} elements differ in {len(ran)} rows{also}{beside}."


def _share(column: Mapping[str, Any]) -> str:
    """ "0", or a percentage that is never rounded to 0."""
    if column["mismatched"] == 0:
        return "0"
    percent = 100 * column["mismatched"] / column["total"]
    return "<0.01%" if percent < 0.01 else f"{percent:.3g}%"


def _delta(column: Mapping[str, Any]) -> str:
    if column["mismatched"] == 0:
        return "0"
    return "not finite" if column["max_abs"] is None else f"{column['max_abs']:.2e}"


def table(report: Mapping[str, Any]) -> Table:
    """Ours column by column; beside it upstream's share of log-probabilities that differ and the largest difference."""
    out = Table(
        title="Elements whose bits differ from the run on one rank",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )
    out.add_column("row", no_wrap=True)
    for heading in ("logits", "logp", "loss", "grads", "norm", "weights", "upstream", "|Δ logp|"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        ours = row["results"][OURS]
        theirs = [r for side, r in row["results"].items() if side != OURS and r["ran"]]
        beside = (
            [_share(theirs[0]["columns"]["log-probs"]), _delta(theirs[0]["columns"]["log-probs"])]
            if theirs
            else ["-", ""]
        )
        if not ours["ran"]:
            word = "FAILED" if ours["failed"] else "not run"
            style = "bold red" if ours["failed"] else "yellow"
            out.add_row(row["name"], f"[{style}]{word}[/]", *[""] * 5, *beside)
            continue
        cells = []
        for name in COLUMNS:
            column = ours["columns"].get(name)
            if column is None:
                cells.append("-")
            else:
                style = "green" if column["mismatched"] == 0 else "bold red"
                cells.append(f"[{style}]{column['mismatched']:,}[/]")
        out.add_row(row["name"], *cells, *beside)
    return out


def markdown(report: Mapping[str, Any]) -> str:
    """Verdict, one table a side, why what did not run did not, and where it ran."""
    lines = ["# A Megatron GPT in every layout", "", verdict(report), ""]
    lines += ["![Share of elements whose bits differ, by row and column](verify-model.png)", ""]
    for side in report["sides"]:
        lines += [f"## {SIDE_NAMES[side]}", ""]
        lines += [
            f"| row | ranks | {' | '.join(COLUMNS)} | largest Δ log-prob | seconds |",
            "|---|---:|" + "---:|" * (len(COLUMNS) + 2),
        ]
        reasons: dict[str, list[str]] = {}
        for row in report["rows"]:
            result = row["results"][side]
            if not result["ran"]:
                reasons.setdefault(result["why"], []).append(row["name"])
                continue
            cells = [
                f"{c['mismatched']:,} of {c['total']:,}" + (f" ({_share(c)})" if c["mismatched"] else "")
                if (c := result["columns"].get(name)) is not None
                else "-"
                for name in COLUMNS
            ]
            lines.append(
                f"| {row['name']} | {row['ranks']} | {' | '.join(cells)} | {_delta(result['columns']['log-probs'])} "
                f"| {result['seconds']:.1f} |"
            )
        lines.append("")
        if reasons:
            lines += ["Not run:", ""]
            lines += [f"- {', '.join(names)}: {_one_line(why)}" for why, names in reasons.items()]
            lines.append("")
    lines += ["| environment | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in report["environment"].items()]
    lines += [f"| {key} | {value} |" for key, value in report["shape"].items()]
    lines.append(f"| dtype | {report['dtype']} |")
    return "\n".join(lines) + "\n"


def _one_line(why: str) -> str:
    """The last line of a traceback says what went wrong."""
    return [line.strip() for line in why.strip().splitlines() if line.strip()][-1]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """One heat map a side: rows by columns, darker where more elements differ, with the share written in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    names = [row["name"] for row in report["rows"]]
    sides = [
        side
        for side in report["sides"]
        if side == OURS or any(row["results"][side]["ran"] for row in report["rows"])
    ]
    figure, panels = pyplot.subplots(
        1, len(sides), figsize=(2.2 + 4.4 * len(sides), 1.9 + 0.34 * len(names)), sharey=True, squeeze=False
    )
    colors = matplotlib.colormaps["OrRd"]
    for axes, side in zip(panels[0], sides, strict=True):
        for y, row in enumerate(report["rows"]):
            result = row["results"][side]
            for x, name in enumerate(COLUMNS):
                column = result["columns"].get(name) if result["ran"] else None
                face: Any
                hatch: str | None
                if column is None:
                    face, text, hatch = "#f5f5f5", "", "///"
                elif column["mismatched"] == 0:
                    face, text, hatch = "#bbf7d0", "0", None
                else:
                    share = column["mismatched"] / column["total"]
                    # Six decades: one element of a million is still seen.
                    face, text, hatch = (
                        colors(0.25 + 0.65 * max(0.0, 1 + math.log10(share) / 6)),
                        _share(column),
                        None,
                    )
                axes.add_patch(
                    Rectangle((x, y), 1, 1, facecolor=face, edgecolor="white", hatch=hatch, linewidth=1.5)
                )
                dark = column is not None and column["mismatched"] > 0.001 * column["total"]
                ink = "white" if dark else "#262626"
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink)
        axes.set_xlim(0, len(COLUMNS))
        axes.set_ylim(len(names), 0)
        axes.set_xticks([x + 0.5 for x in range(len(COLUMNS))])
        axes.set_xticklabels(COLUMNS, rotation=35, ha="right", fontsize=8)
        axes.set_yticks([y + 0.5 for y in range(len(names))])
        axes.set_yticklabels(names, fontsize=9)
        axes.tick_params(length=0)
        axes.set_title(SIDE_NAMES[side], fontsize=10, loc="left")
        for spine in axes.spines.values():
            spine.set_visible(False)
    where = report["environment"].get("device", "device not named")
    figure.suptitle(
        "Elements whose bits differ from the run on one rank",
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
    )
    figure.text(0.01, 0.01, f"{where}; {report['dtype']}; hatched: not run", fontsize=8, color="#525252")
    figure.tight_layout(rect=(0, 0.03, 1, 0.98))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(report: Any, folder: Path, console: Console) -> None:
    """Check the result, write verify-model.json, .md and .png into `folder`, and print the table.

    Raises:
        ReportError: as for `check`; nothing is written then.
    """
    check(report)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verify-model.json").write_text(
        json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "verify-model.md").write_text(markdown(report), encoding="utf-8")
    draw(report, folder / "verify-model.png")
    print_table(console, table(report))
    for row in report["rows"]:
        result = row["results"][OURS]
        if not result["ran"]:
            style = "bold red" if result["failed"] else "yellow"
            console.print(
                f"{row['name']}: {_one_line(result['why'])}", style=style, markup=False, highlight=False
            )
    console.print(report["environment"]["transport"], style="dim", markup=False, highlight=False)
    console.print(
        verdict(report),
        style="bold red" if exit_status(report) else "bold green",
        markup=False,
        highlight=False,
    )
    console.print(f"written: {folder / 'verify-model.json'}, .md, .png", markup=False, soft_wrap=True)
