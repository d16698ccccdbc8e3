"""The portable GEMM on this GPU: bits first, then time against the vendor library in the same run.

    python scripts/gpu/gemm_checks.py [--json [FILE]] [--no-times]

Bits: every launch entry and some tiles beyond the table, rows alone against rows in a batch, subtrees of TP ranks
joined against the unsharded tree, K tails, packed segments, transposed operands, repeats. Exit status 1 when an element
differs, 2 without a GPU. Times are medians of CUDA events on random data; the ratio is ours over the library's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.gemm.kernel import lane_tree, one_lane
from te_overrides.kernels.gemm.launch_table import TABLE, Launch
from te_overrides.kernels.tree.reference import balanced_tree

SHAPES = [
    (4096, 12288, 4096), (4096, 4096, 12288), (8192, 4096, 12288), (512, 4096, 12288), (32, 4096, 12288),
    (8, 24576, 4096), (1, 4096, 12288),
]  # fmt: skip


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def tiles(arch: str, operation: str) -> list[Launch]:
    """The table's entries, and free variations of the largest."""
    entries = list(TABLE[arch, operation])
    big = entries[-1]
    free = [
        replace(big, block_m=64, num_warps=4),
        replace(big, num_stages=2),
        replace(big, block_n=64, group_m=1),
    ]
    return entries + free


def bit_checks(arch: str) -> list[dict[str, Any]]:
    """Name, mismatched, total of every check."""
    rows: list[dict[str, Any]] = []

    def check(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        mismatched, total, first = count_mismatches(got, want)
        rows.append({"check": name, "mismatched": mismatched, "total": total})
        if mismatched:
            print(f"{name}: {mismatched} of {total}, first at {first}", flush=True)

    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in ((300, 520, 1024), (257, 384, 18992)):
            a, b = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype)
            label = f"{dtype} {m}x{n}x{k}"
            for name, function, entries in (
                ("one lane", lambda e, a=a, b=b: one_lane(a, b, entry=e), tiles(arch, "one_lane")),
                ("tree", lambda e, a=a, b=b: lane_tree(a, b, tp_size=1, entry=e), tiles(arch, "lane_tree")),
            ):
                want = function(entries[0])
                for entry in entries[1:]:
                    check(
                        f"{label} {name} {entry.block_m}x{entry.block_n} stages {entry.num_stages}",
                        function(entry),
                        want,
                    )
                check(f"{label} {name} again", function(entries[-1]), want)
            whole = lane_tree(a, b, tp_size=1)
            check(f"{label} tree, one row alone", lane_tree(a[7:8], b, tp_size=1), whole[7:8])
            check(f"{label} tree, 31 rows", lane_tree(a[:31], b, tp_size=1), whole[:31])
            check(f"{label} one lane, one row alone", one_lane(a[7:8], b), one_lane(a, b)[7:8])
            for tp in (2, 4, 8):
                width = k // tp
                parts = [
                    lane_tree(
                        a[:, r * width : (r + 1) * width], b[:, r * width : (r + 1) * width], tp_size=tp
                    )
                    for r in range(tp)
                ]
                check(f"{label} tree joined from TP={tp}", balanced_tree(parts), whole)
            check(f"{label} transposed operand", one_lane(a, b.t().contiguous().t()), one_lane(a, b))
            exact = a.double() @ b.double().t()
            error = (whole.double() - exact).norm() / exact.norm()
            rows[-1]["tree_relative_error"] = float(error)
    a, b = randn(96, 2048), randn(160, 2048)
    packed = lane_tree(a, b, tp_size=1, segments=[1024, 1024])
    cut = [
        torch.cat([x[:, i * 128 : (i + 1) * 128], x[:, 1024 + i * 128 : 1024 + (i + 1) * 128]], 1)
        for i in range(8)
        for x in (a, b)
    ]
    lanes = [one_lane(cut[2 * i], cut[2 * i + 1]) for i in range(8)]
    check("gate then up, lane by lane", packed, balanced_tree(lanes))
    x, y = randn(64, 256, dtype=torch.float32), randn(96, 256, dtype=torch.float32)
    row = torch.arange(8192.0, device="cuda")
    check("float32 is not TF32", one_lane(torch.ones(64, 1, device="cuda"), row[:, None]), row.expand(64, -1))
    check("float32, row alone", one_lane(x[3:4], y), one_lane(x, y)[3:4])
    return rows


def median_ms(functions: dict[str, Callable[[], Any]], repeats: int = 25) -> dict[str, float]:
    """Median milliseconds of each, in another order every round: what ran before sets the clocks, by up to 15%."""
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    flush = torch.empty(256 << 20, device="cuda", dtype=torch.int8)
    order, shuffle = list(functions), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            function = functions[name]
            flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(values) for name, values in times.items()}


def time_checks() -> list[dict[str, Any]]:
    """Milliseconds and ratios for the model's shapes, and whether the library's bits are in our class."""
    rows = []
    for m, n, k in SHAPES:
        a, b = randn(m, k), randn(n, k)
        ms = median_ms(
            {
                "library": lambda a=a, b=b: torch.nn.functional.linear(a, b),
                "one_lane": lambda a=a, b=b: one_lane(a, b),
                "lane_tree": lambda a=a, b=b: lane_tree(a, b, tp_size=1),
            }
        )
        differ, total, _ = count_mismatches(torch.nn.functional.linear(a, b), one_lane(a, b))
        rows.append(
            {
                "shape": [m, n, k],
                **{f"{name}_ms": value for name, value in ms.items()},
                "one_lane_ratio": ms["one_lane"] / ms["library"],
                "lane_tree_ratio": ms["lane_tree"] / ms["library"],
                "library_differs": [differ, total],
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    with json_alone(args.json):
        torch.manual_seed(0)
        arch = architecture(torch.device("cuda", 0))
        bits = bit_checks(arch)
        bad = [row for row in bits if row["mismatched"]]
        print(
            f"{len(bits)} bit checks on {arch}, {len(bad)} with mismatches, {sum(r['total'] for r in bits):,} elements",
            flush=True,
        )
        times = [] if args.no_times or bad else time_checks()
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "hip": torch.version.hip}
    write_json(args.json, {"environment": device, "bits": bits, "times": times})
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
