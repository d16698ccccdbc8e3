"""Norms, RoPE, sums over tokens and SwiGLU on this GPU: bits of the kernels against the references, then speed.

    python scripts/gpu/rows_checks.py [--json [FILE]] [--only bits|times] [--seconds N] [--processes N] [--launches]

Bits: RMSNorm, add+RMSNorm and their gradients for rows of 64 to 32,768 columns, norms over heads, both forms of the
weight, bf16, fp16 and float32, rows alone against rows in a batch, repeats; RoPE in both forms and directions; chains
and trees of granules. Times: share of copy bandwidth, the copy moving as many bytes in the same run, medians,
interleaved, random data, cold cache; `--launches` tries other launches as well. Cells that would start after N seconds
are listed as skipped. Exit status 1 when an element differs, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemm_checks import median_ms, randn

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.granules import kernel as granules_kernel
from te_overrides.kernels.granules import reference as granules_reference
from te_overrides.kernels.launching import Plans
from te_overrides.kernels.rmsnorm import add, kernel, reference
from te_overrides.kernels.rope import kernel as rope_kernel
from te_overrides.kernels.rope.ops import rope
from te_overrides.kernels.rope.reference import Rope
from te_overrides.kernels.swiglu import kernel as swiglu_kernel

WIDTHS = (64, 128, 200, 1000, 2048, 4096, 5120, 8192, 16384, 20000, 32768)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, triton.runtime.errors.TritonError)
Function = Callable[..., Any]
MODULES = {"norm": kernel, "rope": rope_kernel, "swiglu": swiglu_kernel, "granules": granules_kernel}


class Rows:
    """Results of bit checks."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def compare(self, name: str, got: Function, want: Function, *arguments: Any) -> None:
        """One check of two functions that return tensors; an exception is a failed one."""
        try:
            pairs = [(x,) if isinstance(x, torch.Tensor) else x for x in (got(*arguments), want(*arguments))]
            found = [count_mismatches(a, b) for a, b in zip(*pairs, strict=True)]
        except ERRORS as error:
            message = f"{type(error).__name__}: {error}"[:300]
            self.rows.append({"check": name, "mismatched": 1, "total": 1, "error": message})
            return
        row: dict[str, Any] = {
            "check": name,
            "mismatched": sum(m for m, _, _ in found),
            "total": sum(n for _, n, _ in found),
        }
        self.rows.append(row | {"first": [f for _, _, f in found]} if row["mismatched"] else row)


def norm_checks(rows: Rows, columns: int, dtype: torch.dtype) -> None:
    """Every form for one width."""
    for zero_centered in (False, True):
        x, residual, grad, stream = (randn(50, 3, columns, dtype=dtype) for _ in range(4))
        x[0, 0, :4] = torch.tensor([0.0, -0.0, 1e-40, torch.inf], device="cuda").to(dtype)
        x[3, :, 0], residual[3, :, 0], grad[3, :, :2] = 1e-40, -3e-39, -2e-39
        x[1], residual[1], grad[2] = 0.0, -0.0, -0.0
        weight = randn(columns, dtype=dtype)
        form = (weight, 1e-6, zero_centered)
        name = f"{columns} columns {str(dtype).removeprefix('torch.')}{' zero-centred' * zero_centered}"
        rows.compare(f"{name} norm", kernel.rmsnorm, reference.rmsnorm, x, *form)
        rows.compare(f"{name} add", kernel.add_rmsnorm, add.add_rmsnorm, x, residual, *form)
        whole = kernel.add_rmsnorm(x, residual, *form)
        for cut in (slice(0, 1), slice(7, 8), slice(3, 34)):
            parts = tuple(part[cut] for part in whole)
            rows.compare(
                f"{name} rows {cut.start} to {cut.stop} alone", kernel.add_rmsnorm, lambda *_, p=parts: p,
                x[cut], residual[cut], *form,
            )  # fmt: skip
        rstd = reference.rmsnorm(x, *form)[1]
        back = (x, weight, rstd, zero_centered)
        rows.compare(
            f"{name} gradients",
            kernel.rmsnorm_backward_partials,
            reference.rmsnorm_backward_partials,
            grad,
            *back,
        )
        for _ in range(3):
            rows.compare(
                f"{name} add, gradients", kernel.add_rmsnorm_backward_partials, add.add_rmsnorm_backward_partials,
                grad, stream, *back,
            )  # fmt: skip


def head_checks(rows: Rows, columns: int, dtype: torch.dtype) -> None:
    """Norms over heads, of a slice of packed rows."""
    for heads, groups in ((32, 8), (8, 8), (6, 2)):
        x, grad = (randn(70, 2, heads, columns + 8, dtype=dtype)[..., 8:] for _ in range(2))
        weight = randn(columns, dtype=dtype)
        name = f"{heads} heads of {columns} in {groups} groups {dtype}"
        rows.compare(name, kernel.rmsnorm, reference.rmsnorm, x, weight, 1e-6)
        rstd = reference.rmsnorm(x, weight, 1e-6)[1]
        rows.compare(
            f"{name}, gradients", kernel.rmsnorm_backward_partials, reference.rmsnorm_backward_partials,
            grad, x, weight, rstd, False, groups,
        )  # fmt: skip


def angles(positions: int, rotated: int) -> torch.Tensor:
    """[positions, 1, 1, rotated] as Megatron makes them."""
    inverse = 1.0 / 1e6 ** (torch.arange(0, rotated, 2, device="cuda") / rotated)
    found = torch.outer(torch.arange(positions, device="cuda").float(), inverse)
    return torch.cat([found, found], dim=-1)[:, None, None, :]


def rope_both_ways(function: Function, t: torch.Tensor, grad: torch.Tensor, *arguments: Any) -> Any:
    """Result and gradient of `rope` or of the reference."""
    leaf = t.detach().clone().requires_grad_()
    out = function(leaf, *arguments)
    out.backward(grad)
    return out.detach(), leaf.grad


def rope_checks(rows: Rows, dtype: torch.dtype) -> None:
    """Halves and neighbours, all channels and some, forward and gradient, positions alone."""
    special = torch.tensor([-0.0, 1e-40, 3e38, torch.inf], device="cuda")
    ours = functools.partial(rope_both_ways, rope)
    theirs = functools.partial(rope_both_ways, Rope.apply)
    cases = itertools.product(((64, 64), (128, 128), (128, 64), (96, 96), (192, 64)), (False, True))
    for (columns, rotated), interleaved in cases:
        t = randn(300, 2, 8, columns + 8, dtype=dtype)[..., 8:]
        grad, freqs = randn(300, 2, 8, columns, dtype=dtype), angles(300, rotated)
        t[1, 0, 0, :4], grad[1, 0, 0, :4] = special.to(dtype), special.flip(0).to(dtype)
        name = f"{rotated} of {columns} channels {dtype} {'neighbours' if interleaved else 'halves'}"
        rows.compare(name, ours, theirs, t, grad, freqs, interleaved, 1.0)
        whole = rope(t, freqs, interleaved)[40:41]
        rows.compare(
            f"{name}, alone", rope, lambda *_, w=whole: w, t[40:41], freqs[40:41].clone(), interleaved
        )
    long = torch.arange(0, 2**20, 8, device="cuda").float().view(-1, 1, 1, 2)
    t = randn(long.shape[0], 1, 1, 2, dtype=dtype)
    rows.compare(f"angles to 2^20 {dtype}", rope, Rope.apply, t, long, False, 1.0)


def granule_checks(rows: Rows, dtype: torch.dtype) -> None:
    """Chains and trees."""
    for shape in ((1, 1, 8), (16, 1, 33), (1000, 2, 4096), (17, 3, 100)):
        terms = randn(*shape, dtype=dtype)
        rows.compare(
            f"chains {shape} {dtype}", granules_kernel.granule_partials,
            lambda x: granules_reference.granule_partials(x.float()), terms,
        )  # fmt: skip
    for shape in ((1, 1, 64), (512, 1, 4096), (1100, 2, 1000), (512, 2, 8, 128), (3, 5, 7)):
        x = randn(*shape, dtype=torch.float32) * 1e3
        rows.compare(f"tree {shape}", granules_kernel.sum_granules, granules_reference.sum_granules, x)


CHECKS = {"norm": norm_checks, "heads": head_checks, "rope": rope_checks, "granules": granule_checks}


def run_group(kind: str, *arguments: Any) -> list[dict[str, Any]]:
    """Rows of one group of checks, in a process of its own, since compiling is what takes the time."""
    torch.manual_seed(0)
    rows = Rows()
    try:
        CHECKS[kind](rows, *arguments)
    except ERRORS as error:
        message = f"{type(error).__name__}: {error}"[:300]
        rows.rows.append({"check": f"{kind} {arguments}", "mismatched": 1, "total": 1, "error": message})
    return rows.rows


class Cell:
    """One kernel at one size: what it runs, and how many bytes it must move."""

    def __init__(self, name: str, module: str, moved: int, ours: Callable[[], Any], peer: Any = None) -> None:
        self.name, self.module, self.moved, self.ours, self.peer = name, module, moved, ours, peer


def norm_cell(what: str, tokens: int, columns: int) -> Cell:
    """A norm over the hidden size."""
    x, y, g, h = (randn(tokens, 1, columns) for _ in range(4))
    weight, size = randn(columns), x.nbytes
    rstd = kernel.rmsnorm(x, weight, 1e-6)[1] if what.endswith("gradients") else None
    name = f"{what}, {tokens} x {columns}"
    partials = tokens // 16 * columns * 4
    if what == "norm":
        shape = (columns,)
        return Cell(
            name, "norm", 2 * size, lambda: kernel.rmsnorm(x, weight, 1e-6),
            lambda: torch.nn.functional.rms_norm(x, shape, weight, 1e-6),
        )  # fmt: skip
    if what == "add+norm":
        return Cell(name, "norm", 4 * size, lambda: kernel.add_rmsnorm(x, y, weight, 1e-6))
    if what == "norm gradients":
        return Cell(
            name, "norm", 3 * size + partials, lambda: kernel.rmsnorm_backward_partials(g, x, weight, rstd)
        )
    return Cell(
        name, "norm", 4 * size + partials,
        lambda: kernel.add_rmsnorm_backward_partials(g, h, x, weight, rstd),
    )  # fmt: skip


def head_cell(what: str, tokens: int, heads: int) -> Cell:
    """A norm over heads of 128."""
    x, g = (randn(tokens, 1, heads, 128) for _ in range(2))
    weight = randn(128)
    if what == "head norm":
        return Cell(
            f"{what}, {tokens} x {heads}", "norm", 2 * x.nbytes, lambda: kernel.rmsnorm(x, weight, 1e-6)
        )
    rstd = kernel.rmsnorm(x, weight, 1e-6)[1]
    return Cell(
        f"{what}, {tokens} x {heads}", "norm", 3 * x.nbytes,
        lambda: kernel.rmsnorm_backward_partials(g, x, weight, rstd, False, 8),
    )  # fmt: skip


def rope_cell(tokens: int, heads: int, transpose: bool) -> Cell:
    t, freqs = randn(tokens, 1, heads, 128), angles(tokens, 128)
    c, s = rope_kernel.tables(freqs, t.dtype, 1.0)
    name = f"RoPE{' gradient' * transpose}, {tokens} x {heads}"
    return Cell(name, "rope", 2 * t.nbytes, lambda: rope_kernel.rotate(t, c, s, False, transpose))


def table_cell(tokens: int) -> Cell:
    freqs = angles(tokens, 128)
    return Cell(
        f"RoPE tables, {tokens} x 128", "rope", 2 * freqs.nbytes,
        lambda: rope_kernel.tables(freqs, torch.bfloat16, 1.0),
    )  # fmt: skip


def swiglu_cell(tokens: int, backward: bool) -> Cell:
    packed, grad = randn(tokens, 2 * 12288), randn(tokens, 12288)
    if backward:
        return Cell(
            f"SwiGLU gradient, {tokens} x 12288", "swiglu", 5 * grad.nbytes,
            lambda: swiglu_kernel.swiglu_packed_backward(grad, packed),
        )  # fmt: skip
    return Cell(
        f"SwiGLU, {tokens} x 12288", "swiglu", 3 * grad.nbytes, lambda: swiglu_kernel.swiglu_packed(packed)
    )


def granule_cell(granules: int, columns: int) -> Cell:
    x = randn(granules, 1, columns, dtype=torch.float32)
    return Cell(
        f"tree of granules, {granules} x {columns}", "granules", x.nbytes,
        lambda: granules_kernel.sum_granules(x),
    )  # fmt: skip


COLUMNS = (1024, 2048, 4096, 5120, 8192, 16384, 32768)
CELLS: tuple[Callable[[], Cell], ...] = (
    *(
        lambda what=what, columns=columns: norm_cell(what, (128 << 20) // (2 * columns), columns)
        for what in ("add+norm", "add+norm gradients")
        for columns in COLUMNS
    ),
    *(
        lambda what=what, columns=columns: norm_cell(what, (128 << 20) // (2 * columns), columns)
        for what in ("norm", "norm gradients")
        for columns in (4096, 5120)
    ),
    lambda: norm_cell("add+norm", 8192, 4096),
    *(
        lambda what=what, heads=heads: head_cell(what, 16384, heads)
        for what in ("head norm", "head norm gradients")
        for heads in (32, 8)
    ),
    *(
        lambda heads=heads, back=back: rope_cell(16384, heads, back)
        for heads in (32, 8)
        for back in (False, True)
    ),
    lambda: table_cell(16384),
    lambda: swiglu_cell(4096, False),
    lambda: swiglu_cell(4096, True),
    lambda: granule_cell(512, 4096),
)


def other_launches(cell: str) -> list[dict[str, Any]]:
    """Launches to time beside the table's: attribute of the kernel's module -> value."""
    what, _, size = cell.partition(", ")
    if what in ("add+norm", "add+norm gradients", "norm gradients") and not cell.endswith("8192 x 4096"):
        columns = int(size.partition(" x ")[2])
        width = triton.next_power_of_2(columns)
        if what == "add+norm":
            return [
                {"forward_launch": (1, min(1024, threads))} for threads in (max(32, width // 64), width // 16)
            ]
        return [
            {"backward_launch": (1, min(1024, threads))} for threads in (max(32, width // 64), width // 16)
        ]
    if cell == "head norm, 16384 x 32":
        return [{"forward_launch": launch} for launch in ((4, 32), (8, 32), (16, 128), (32, 128), (16, 32))]
    if cell == "head norm gradients, 16384 x 32":
        return [{"backward_launch": launch} for launch in ((2, 32), (1, 32), (4, 64), (4, 32), (8, 128))]
    if cell == "RoPE, 16384 x 32":
        found = ((1024, 128), (4096, 128), (1024, 64), (4096, 256), (2048, 64))
        return [{"PAIRS": pairs, "THREADS": threads} for pairs, threads in found]
    return []


def with_launch(cell: Cell, launch: dict[str, Any]) -> Callable[[], Any]:
    """`cell.ours` under another launch: plans of its own, so that both stay compiled."""
    module, plans = MODULES[cell.module], Plans()

    def run() -> Any:
        values = {k: (lambda *_, v=v: v) if k.endswith("_launch") else v for k, v in launch.items()}
        before = {name: getattr(module, name) for name in (*values, "_plans")}
        for name, value in (values | {"_plans": plans}).items():
            setattr(module, name, value)
        try:
            return cell.ours()
        finally:
            for name, value in before.items():
                setattr(module, name, value)

    return run


def warm(index: int, launches: bool) -> list[str]:
    """Compile what a cell and its other launches run: Triton keeps it on disk for the timing process."""
    problems = []
    cell = CELLS[index]()
    for launch in [{}, *(other_launches(cell.name) if launches else [])]:
        try:
            with_launch(cell, launch)()
            torch.cuda.synchronize()
        except ERRORS as error:
            problems.append(f"{cell.name} {launch}: {type(error).__name__}: {error}"[:300])
    return problems


def time_cell(index: int, launches: bool) -> dict[str, Any]:
    """Milliseconds, and shares of the bandwidth of a copy that moves as many bytes."""
    cell = CELLS[index]()
    source = torch.empty(cell.moved // 2, dtype=torch.int8, device="cuda").random_(-9, 9)
    target = torch.empty_like(source)
    functions: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source), "ours": cell.ours}
    if cell.peer is not None:
        functions["torch"] = cell.peer
    others = other_launches(cell.name) if launches else []
    row: dict[str, Any] = {"cell": cell.name, "megabytes_moved": round(cell.moved / 2**20)}
    for launch in others:
        run = with_launch(cell, launch)
        label = ", ".join(f"{key} {value}" for key, value in launch.items())
        try:
            run()
            functions[label] = run
        except ERRORS as error:
            row.setdefault("errors", {})[label] = f"{type(error).__name__}: {error}"[:200]
    ms = median_ms(functions, 15)
    return row | {"ms": ms, "of_copy_bandwidth": {k: ms["copy"] / v for k, v in ms.items() if k != "copy"}}


def parallel(jobs: list[tuple[Any, ...]], processes: int, deadline: float) -> list[tuple[str, Any]]:
    """(function's name, result) of every job in fresh processes; what takes too long is left out and said."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context)
    futures = {pool.submit(function, *arguments): function.__name__ for function, *arguments in jobs}
    found = []
    try:
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            found.append((futures[future], future.result()))
    except TimeoutError:
        print(f"the time was up for {sum(not f.done() for f in futures)} of {len(futures)} jobs", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def bit_groups(widths: list[int]) -> list[tuple[Any, ...]]:
    """Groups of bit checks, the longest first."""
    found: list[tuple[Any, ...]] = [
        (run_group, "norm", width, dtype) for width in sorted(widths, reverse=True) for dtype in DTYPES
    ]
    found += [(run_group, "heads", width, dtype) for width in (64, 128, 256) for dtype in DTYPES[:2]]
    return found + [(run_group, kind, dtype) for kind in ("rope", "granules") for dtype in DTYPES]


def times(deadline: float, launches: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index in range(len(CELLS)):
        if time.monotonic() > deadline:
            found.append({"cell": index, "skipped": "the time was up"})
            continue
        try:
            row = time_cell(index, launches)
        except ERRORS as error:
            row = {"cell": index, "error": f"{type(error).__name__}: {error}"[:300]}
        found.append(row)
        shares = {name: round(share, 3) for name, share in row.get("of_copy_bandwidth", {}).items()}
        print(
            row["cell"],
            row.get("error") or f"{row['ms']['ours']:.4f} ms, of copy bandwidth {shares}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--only", choices=("bits", "times"))
    parser.add_argument(
        "--widths", type=int, nargs="+", default=list(WIDTHS), help="columns of the bit checks"
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--launches", action="store_true", help="time other launches beside the table's")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    with json_alone(args.json):
        deadline = time.monotonic() + args.seconds
        groups = bit_groups(args.widths) if args.only != "times" else []
        cells = [(warm, index, args.launches) for index in range(len(CELLS))] if args.only != "bits" else []
        answers = parallel(
            [*groups, *cells], args.processes, deadline - (0.25 * args.seconds if cells else 0.0)
        )
        rows = [row for name, rows in answers if name == "run_group" for row in rows]
        if sum(name == "run_group" for name, _ in answers) < len(groups):
            rows.append({"check": "all groups", "mismatched": 1, "total": 1, "error": "the time was up"})
        bad = [row for row in rows if row["mismatched"]]
        for line in [
            *bad,
            *(problem for name, problems in answers if name == "warm" for problem in problems),
        ]:
            print(line, flush=True)
        total = sum(row["total"] for row in rows)
        print(f"{len(rows)} bit checks, {len(bad)} with mismatches, {total:,} elements", flush=True)
        found = times(deadline, args.launches) if cells else []
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "bits": rows, "times": found,
    }  # fmt: skip
    write_json(args.json, report)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
