"""`python -m te_overrides.audit`: the audit on the command line.

    python -m te_overrides.audit --op log1p --arch gfx950
    python -m te_overrides.audit path/to/file.py:kernel --arch gfx942 --arch gfx950 --arg x_ptr=*bf16

Exit status: 0 every launch is in one group, 1 there is more than one group, 2 wrong usage, 3 one group, but some
launches are unknown.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

__all__ = ["main"]

_DEFAULT_GRID = {"num_warps": (1, 2, 4, 8)}
_BLOCKS = tuple(2**power for power in range(1, 13))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m te_overrides.audit",
        description="Compile a Triton kernel for AMD GPUs over a grid of launch configurations, without a GPU, "
        "and say which of them compute the same bits.",
    )
    parser.add_argument("kernel", nargs="?", help="path/to/file.py:kernel")
    parser.add_argument(
        "--op", help="a library function instead of a kernel, float32 (log1p, exp, pow, fma, …)"
    )
    parser.add_argument(
        "--masked", action="store_true", help="--op: compare indices with n, as for odd sizes"
    )
    parser.add_argument(
        "--arch", action="append", help="gfx942, gfx950 (default), gfx90a, gfx1100; repeatable"
    )
    parser.add_argument(
        "--grid", action="append", default=[], metavar="NAME=V,V,…",
        help="values of a constexpr or option to combine (default: the block 2…4096, num_warps 1,2,4,8)",
    )  # fmt: skip
    parser.add_argument(
        "--constexpr", action="append", default=[], metavar="NAME=V", help="a fixed constexpr"
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=TYPE", help="e.g. x_ptr=*bf16, n=i32"
    )
    parser.add_argument(
        "--scalar", action="append", default=[], metavar="NAME=V", help="value of a scalar, or cdiv(n,BLOCK)"
    )
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=K", help="buffer of K × elements"
    )
    parser.add_argument("--block", help="the constexpr that splits the elements over programs")
    parser.add_argument("--elements", type=int, help="output elements compared (default: the largest block)")
    parser.add_argument("--samples", type=int, default=225280, help="elements executed per group; 0 for none")
    parser.add_argument("--range", nargs=2, type=float, default=(0.0, 1.0), metavar=("LOW", "HIGH"),
                        help="uniform samples from [LOW, HIGH)")  # fmt: skip
    parser.add_argument(
        "--certificate", action="store_true",
        help="do not execute: classes by matrix instruction, K order and reductions (GEMM, attention)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="machine-readable, with one entry per group")
    return parser


def _pairs(entries: Sequence[str], option: str) -> dict[str, str]:
    found = {}
    for entry in entries:
        name, separator, value = entry.partition("=")
        if not separator or not name or not value:
            raise ValueError(f"{option} takes NAME=VALUE, got {entry!r}")
        found[name] = value
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _scalar(text: str) -> Any:
    """A number, or `cdiv(A,B)` of the number of elements `n`, numbers and constexprs, rounded up."""
    match = re.fullmatch(r"cdiv\((\w+),\s*(\w+)\)", text)
    if match is None:
        return _literal(text)

    def value(launch: Any, elements: int) -> int:
        known = dict(launch.constexprs) | {"n": elements}
        above, below = (int(known.get(name, name)) for name in match.groups())
        return -(-above // below)

    return value


def _axes(arguments: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    return {
        name: tuple(_literal(value) for value in text.split(","))
        for name, text in _pairs(arguments.grid, "--grid").items()
    }


def _audit(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from te_overrides.audit import ops
    from te_overrides.audit.api import audit
    from te_overrides.audit.compile import launch_grid
    from te_overrides.audit.samples import uniform_inputs
    from te_overrides.audit.source import kernel_from_file
    from te_overrides.audit.witness import witnesses

    if (arguments.kernel is None) == (arguments.op is None):
        raise ValueError("name either a kernel (path/to/file.py:kernel) or --op")
    axes = _axes(arguments)
    constexprs = {name: _literal(text) for name, text in _pairs(arguments.constexpr, "--constexpr").items()}
    if arguments.op:
        kernel = ops.op_kernel(arguments.op, arguments.masked)
    else:
        kernel = kernel_from_file(
            arguments.kernel,
            _pairs(arguments.arg, "--arg"),
            {name: _scalar(text) for name, text in _pairs(arguments.scalar, "--scalar").items()},
            constexprs,
            [*axes],
            arguments.block,
            {name: int(text) for name, text in _pairs(arguments.size, "--size").items()},
        )
    axes = {kernel.block: _BLOCKS} | _DEFAULT_GRID | axes
    launches = launch_grid(axes)
    if arguments.certificate:
        return [_certificates(kernel, arch, launches) for arch in arguments.arch or ["gfx950"]]
    elements = arguments.elements or max(int(value) for value in axes[kernel.block])
    reports = []
    for arch in arguments.arch or ["gfx950"]:
        show = None if arguments.json else _progress(arch, len(launches))
        result = audit(kernel, arch, launches, elements, show)
        report = result.as_json() | {"signature": dict(kernel.signature), "triton": _triton_version()}
        if arguments.samples:
            arrays = uniform_inputs(kernel, arguments.samples, 0, *arguments.range)
            exact = functools.partial(_exact, kernel, arguments.op) if arguments.op else None
            found = witnesses(kernel, arch, result, arrays, arguments.samples, exact)
            for group, witness in zip(report["groups"], found, strict=True):
                group["numeric"] = asdict(witness) | {"launch": str(witness.launch)}
        reports.append(report)
    return reports


def _certificates(kernel: Any, arch: str, launches: Any) -> dict[str, Any]:
    """Scalars are taken to be multiples of 16, as those of real shapes are."""
    from te_overrides.audit.certificate import certify, classes

    divisible = tuple(name for name, kind in kernel.signature.items() if kind in ("i32", "i64"))
    found = classes(certify(kernel, arch, launches, divisible))
    return {
        "kernel": kernel.name,
        "arch": arch,
        "triton": _triton_version(),
        "one_class": len(found) == 1 and not found[0][0].unresolved,
        "unknown": [],
        "groups": [
            {
                "certificate": certificate.as_json(),
                "launches": [dict((*launch.constexprs, *launch.options)) for launch in members],
            }
            for certificate, members in found
        ],
    }


def _exact(kernel: Any, op: str, arrays: Any) -> Any:
    from te_overrides.audit.ops import reference

    return reference(op, *(arrays[name] for name in kernel.pointers if name != "out_ptr"))


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _progress(arch: str, total: int) -> Any:
    count = iter(range(1, total + 1))

    def show(launch: Any) -> None:
        if sys.stderr.isatty():
            print(f"\r{arch} {next(count)}/{total} {launch}\033[K", end="", file=sys.stderr)

    return show


def _ranges(launches: Sequence[dict[str, Any]]) -> str:
    """The launches of a group, those that differ only in the first axis on one line."""
    first = next(iter(launches[0]))
    lines: dict[str, list[str]] = {}
    for launch in launches:
        rest = " ".join(f"{name}={value}" for name, value in launch.items() if name != first)
        lines.setdefault(rest, []).append(str(launch[first]))
    return "\n".join(f"{rest} {first}={','.join(values)}" for rest, values in lines.items())


def _show_certificates(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report['kernel']} on {report['arch']} (Triton {report['triton']})", title_justify="left"
    )
    for heading in ("class", "launches", "matrix instructions", "reductions", "unresolved"):
        table.add_column(heading)
    for number, group in enumerate(report["groups"]):
        certificate = group["certificate"]
        dots = (
            f"{dot['element']} {'x'.join(map(str, dot['instruction']))} kWidth {dot['k_width']}"
            for dot in certificate["dots"]
        )
        reductions = (
            f"{' '.join(one['combine'])} over {one['extent']}: {one['layout']}"
            for one in certificate["reductions"]
        )
        table.add_row(
            str(number), _ranges(group["launches"]), "\n".join(dots), "\n".join(reductions),
            "\n".join(certificate["unresolved"]),
        )  # fmt: skip
    Console().print(table)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    count = len(report["groups"])
    table = Table(
        title=f"{report['kernel']} on {report['arch']} (Triton {report['triton']})", title_justify="left"
    )
    for heading in (
        "group",
        "launches",
        "elements apart",
        "executed: differ",
        "max abs",
        "mean ULP",
        "max ULP",
    ):
        table.add_column(heading)
    for number, group in enumerate(report["groups"]):
        numeric = group.get("numeric") or {}
        against, errors = numeric.get("against_first"), numeric.get("errors")
        table.add_row(
            f"{number} {group['digest'][:8]}",
            _ranges(group["launches"]),
            f"{group['elements_apart']} of {report['elements']}",
            f"{against['differing']} of {against['total']}" if against else numeric.get("refused", ""),
            f"{against['max_abs']:.3e}" if against else "",
            f"{errors['mean_ulp']:.4f}" if errors else "",
            f"{errors['max_ulp']:.3f}" if errors else "",
        )
    console.print(table)
    for entry in report["unknown"]:
        console.print(f"unknown: {entry['launch']}: {entry['reason']}", markup=False, highlight=False)
    if report["one_class"]:
        console.print("one group: equal bits for every input, whatever the launch")
    elif count > 1:
        console.print(f"{count} groups: the launch decides which expression is computed")
    else:
        console.print("not proved: there are launches the audit does not understand")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        reports = _audit(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1))
    else:
        for report in reports:
            (_show_certificates if arguments.certificate else _show)(report)
    if any(len(report["groups"]) > 1 for report in reports):
        return 1
    return 0 if all(report["one_class"] for report in reports) else 3
