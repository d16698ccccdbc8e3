"""What truncation does to a residual stream: 72 fused add+RMSNorm calls (36 layers x 2), on a CPU.

    python scripts/reproduce_rmsnorm_bias.py [--json [FILE]] [--plot FILE] [--rows N] [--seed N]

AITER's `rmsnorm2d_fwd_with_add` on gfx942 drops the low half of a float32 where it should round (ROCm/aiter#5151). The
five rounding modes of its header are emulated bit by bit, and this project's `te_overrides.kernels.rmsnorm.add` runs
beside them. Where AITER and an AMD GPU are there, the installed operator runs, too; elsewhere its row says "not run".

Single calls: the sizes of the published report, (scale of x, scale of residual), random normal bf16, hidden 4096.

Stream: residual of unit scale, every call adds an independent update of *half* that scale. That ratio had to be chosen;
half is what reproduces the published figures (0.1 shrinks by 13.8% after 72 calls, 1.0 by 8.7%). Shrink is
`1 - |residual| / |exact|` over all rows, where `exact` adds the same updates in float64 and never rounds, so that
rounding is measured, too; the cosine is between `out` and that of the stream that rounds (mode 0), averaged over rows.

The signed error is the mean of `(|stored| - |exact|) / |exact|`: a tolerance in ULP cannot see truncation, the mean
can. "not finite" and null in JSON: what was stored holds NaN. Published figures are printed as published and enter no
computation.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_plugins.verify.outputs import add_json, json_alone, write_json  # noqa: E402
from te_overrides.kernels.bits import count_mismatches  # noqa: E402
from te_overrides.kernels.rmsnorm.add import add_rmsnorm  # noqa: E402

HIDDEN, CALLS, EPS, UPDATE_SCALE = 4096, 72, 1e-6, 0.5
SHOWN = (24, 48, 72)
CASES = ((512, 1.0, 1.0), (512, 1.0, 30.0), (4096, 3.0, 3.0))
PUBLISHED = {
    "source": "ROCm/aiter#5151, measured on gfx942",
    "shrink_percent": {24: 3.292, 48: 6.199, 72: 8.980},
    "cosine": {24: 0.99978, 48: 0.99924, 72: 0.99837},
    "mean_signed_error": [-2.80e-3, -1.53e-3],
    "differ_percent": [27, 50],
}
Rounding = Callable[[torch.Tensor], torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _halves(x: torch.Tensor) -> torch.Tensor:
    """[…, 2] the low and the high half of every float32 (little endian)."""
    return x.contiguous().view(torch.bfloat16).unflatten(-1, (-1, 2))


def nearest_even(x: torch.Tensor) -> torch.Tensor:
    """Mode 0."""
    return x.to(torch.bfloat16)


def low_half(x: torch.Tensor) -> torch.Tensor:
    """Mode 1, meant to truncate and keep NaN: it returns the half of the word that should be dropped."""
    return torch.where(x.isnan(), x.to(torch.bfloat16), _halves(x)[..., 0])


def truncate(x: torch.Tensor) -> torch.Tensor:
    """Mode 2."""
    return _halves(x)[..., 1].contiguous()


def value_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Mode 3: rounds right, then converts the 16 bits as an integer's value; 1.0 (0x3F80) becomes 16256."""
    rounded = x.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return rounded.to(torch.float32).to(torch.bfloat16)


ROUNDS, TRUNCATES = "0 nearest even", "2 truncate"
MODES: dict[str, Rounding | None] = {
    ROUNDS: nearest_even,
    "1 truncate, keep NaN": low_half,
    TRUNCATES: truncate,
    "3 nearest even, assembly": value_of_bits,
    "4 nearest away, assembly": None,
}
WHY_ABSENT = {"4 nearest away, assembly": "does not compile"}


def emulated(rounding: Rounding) -> Call:
    """The operator with one rounding mode: (x, residual, weight) -> (out, residual_out). float32 inside."""

    def call(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.float() + residual.float()
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
        return rounding(total * scale * weight.float()), rounding(total)

    return call


def ours(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This project's."""
    out, residual_out, _ = add_rmsnorm(x, residual, weight, EPS)
    return out, residual_out


def installed() -> Call | str:
    """AITER's own operator as installed, or why it cannot run here."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return "not run: no AMD GPU here"
    if importlib.util.find_spec("aiter") is None:
        return "not run: AITER is not installed"
    import aiter

    def call(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = (t.cuda() for t in (x, residual, weight))
        out, residual_out = torch.empty_like(x), torch.empty_like(x)
        aiter.rmsnorm2d_fwd_with_add(out, x, residual, residual_out, weight, EPS)
        return out.cpu(), residual_out.cpu()

    return call


def operators() -> dict[str, Call | str]:
    """Name -> operator, or why there is none."""
    found: dict[str, Call | str] = {
        name: emulated(mode) if mode is not None else WHY_ABSENT[name] for name, mode in MODES.items()
    }
    return found | {"ours": ours, "installed AITER": installed()}


def normal(rows: int, scale: float, generator: torch.Generator) -> torch.Tensor:
    """[rows, HIDDEN] bf16."""
    return (torch.randn(rows, HIDDEN, generator=generator) * scale).to(torch.bfloat16)


def signed_error(got: torch.Tensor, exact: torch.Tensor) -> tuple[float | None, float | None]:
    """Mean of ``(|got| - |exact|) / |exact|`` where exact is not 0, and its standard error; None if not finite."""
    errors = ((got.double().abs() - exact.double().abs()) / exact.double().abs())[exact != 0]
    mean = errors.mean().item()
    return (mean, errors.std().item() / errors.numel() ** 0.5) if math.isfinite(mean) else (None, None)


def single_calls(call: Call, seed: int) -> list[dict[str, Any]]:
    """Both stores of one call for each published size, against float64."""
    rows = []
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for count, x_scale, residual_scale in CASES:
        x, residual = normal(count, x_scale, generator), normal(count, residual_scale, generator)
        out, residual_out = call(x, residual, weight)
        exact = x.double() + residual.double()
        mean, error = signed_error(residual_out, exact)
        normed = exact / (exact.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
        rounded = exact.float().to(torch.bfloat16)
        rows.append(
            {
                "rows": count, "x_scale": x_scale, "residual_scale": residual_scale,
                "mean_signed_error": mean, "standard_error": error,
                "mean_signed_error_of_out": signed_error(out, normed)[0],
                "differ_from_nearest_even": count_mismatches(residual_out, rounded)[0], "total": rounded.numel(),
            }
        )  # fmt: skip
    return rows


def streams(calls: dict[str, Call], rows: int, seed: int) -> dict[str, dict[str, Any]]:
    """Shrink in percent after every call; cosine of `out` with that of mode 0 at the calls shown.

    "broken_at" is the call after which the stream was not finite any more, None for those that stayed.
    """
    generator = torch.Generator().manual_seed(seed)
    start = normal(rows, 1.0, generator)
    exact, weight = start.double(), torch.ones(HIDDEN, dtype=torch.bfloat16)
    residuals = dict.fromkeys(calls, start)
    found: dict[str, dict[str, Any]] = {
        name: {"shrink_percent": [], "cosine": {}, "broken_at": None} for name in calls
    }
    for index in range(1, CALLS + 1):
        update = normal(rows, UPDATE_SCALE, generator)
        exact = exact + update.double()
        length = exact.norm()
        outs: dict[str, torch.Tensor] = {}
        for name in list(residuals):
            outs[name], residuals[name] = calls[name](update, residuals[name], weight)
            if not bool(residuals[name].isfinite().all()):
                found[name]["broken_at"] = index
                del residuals[name]
                continue
            found[name]["shrink_percent"].append(
                100 * (1 - (residuals[name].double().norm() / length).item())
            )
            if index in SHOWN:
                pair = (outs[name].double(), outs[ROUNDS].double())
                cosine = torch.nn.functional.cosine_similarity(*pair, dim=-1).mean().item()
                found[name]["cosine"][index] = cosine
    return found


def measure(rows: int, seed: int) -> dict[str, Any]:
    """Everything that is shown."""
    everything = operators()
    there = {name: call for name, call in everything.items() if not isinstance(call, str)}
    drifts = streams(there, rows, seed)
    results = {
        name: {"single_calls": single_calls(there[name], seed), "stream": drifts[name]}
        if name in there
        else {"absent": why}
        for name, why in everything.items()
    }
    return {
        "setup": {
            "hidden": HIDDEN, "calls": CALLS, "rows": rows, "seed": seed, "residual_scale": 1.0,
            "update_scale": UPDATE_SCALE, "device": "cpu (emulated)", "torch": torch.__version__,
        },
        "operators": results,
        "published": PUBLISHED,
    }  # fmt: skip


def _range(values: list[float | None]) -> str:
    numbers = [v for v in values if v is not None]
    if len(numbers) < len(values):
        return "not finite"
    return "\n".join(f"{v:+.2e}" for v in (min(numbers), max(numbers)))


def _cells(result: dict[str, Any]) -> list[str]:
    calls, drift = result["single_calls"], result["stream"]
    shares = [100 * c["differ_from_nearest_even"] / c["total"] for c in calls]
    cells = [
        _range([c["mean_signed_error"] for c in calls]),
        _range([c["mean_signed_error_of_out"] for c in calls]),
        f"{min(shares):.0f} … {max(shares):.0f}%" if max(shares) else "0",
    ]
    for index in SHOWN:
        if len(drift["shrink_percent"]) < index:
            cells.append(f"not finite from\ncall {drift['broken_at']}")
        else:
            cells.append(f"{drift['shrink_percent'][index - 1]:.3f}%\n{drift['cosine'][index]:.5f}")
    return cells


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    setup, published = report["setup"], report["published"]
    table = Table(
        title=f"add+RMSNorm, {CALLS} calls, hidden {HIDDEN}, {setup['rows']} rows, updates of {UPDATE_SCALE} the scale"
    )
    for name in (
        "rounding",
        "signed error of\nresidual_out",
        "signed error\nof out",
        "residual_out unlike\nnearest even",
    ):
        table.add_column(name)
    for index in SHOWN:
        table.add_column(f"{index} calls: shrink\ncosine of out", justify="right")
    for name, result in report["operators"].items():
        style = {TRUNCATES: "red", "ours": "green"}.get(name)
        cells = [result["absent"]] if "absent" in result else _cells(result)
        table.add_row(name, *cells, style=style)
    table.add_section()
    low, high = published["mean_signed_error"]
    least, most = published["differ_percent"]
    table.add_row(
        f"published, {TRUNCATES}", f"{low:+.2e}\n{high:+.2e}", "", f"{least} … {most}%",
        *(f"{published['shrink_percent'][i]:.3f}%\n{published['cosine'][i]:.5f}" for i in SHOWN), style="dim",
    )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        f"published: {published['source']}. Everything else was computed just now, on a CPU.", style="dim"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Shrink over calls; published figures as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for name, color, style in (
        (TRUNCATES, "#c2410c", "-"),
        (ROUNDS, "#64748b", "-"),
        ("ours", "#0e7490", "--"),
    ):
        values = report["operators"][name]["stream"]["shrink_percent"]
        axes.plot(range(1, len(values) + 1), values, color=color, linestyle=style, label=name)
    points = report["published"]["shrink_percent"]
    axes.plot(list(points), list(points.values()), "o", color="black", label="published (gfx942)")
    axes.set_xlabel("calls of add+RMSNorm")
    axes.set_ylabel("shrink of the residual stream, %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (needs matplotlib)")
    parser.add_argument("--rows", type=int, default=64, help="rows of the stream (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    report = measure(options.rows, options.seed)
    if options.plot is not None:
        plot(report, options.plot)
    with json_alone(options.json):
        show(report)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
