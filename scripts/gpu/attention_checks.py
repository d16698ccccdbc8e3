"""Attention on this GPU: bits first, then error against float64, then time against cuDNN's attention.

    python scripts/gpu/attention_checks.py [--json [FILE]] [--no-times] [--processes N] [--only TEXT …]

Bits (attention_bits.py): CP 1/2/4/8 times TP 1/2/4/8 in both layouts, batch composition, 100 repeats beside other
work, every launch of a class and free variations of it, Hopper's kernels against the portable ones, packed sequences
with NaN between them, decode over pages against prefill. Exit status 1 when an element differs or a case did not run,
2 without a GPU. Times are medians of CUDA events on random data, all candidates in turn; speed is cuDNN's time over
ours. On an AMD GPU, error and times are compared with nothing: there is no cuDNN.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attention_bits import CASES, CAUSAL, NAMES, everything, operands, whole

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.attention import kernel
from te_overrides.kernels.attention.launch_table import Entries, entries_for
from te_overrides.kernels.attention.runs import Run

HEADS, GROUPS = 32, 8
FLUSH = 1 << 28


def run_case(name: str) -> list[list[Any]]:
    """Rows of one case in this process."""
    torch.manual_seed(0)
    function, arguments = CASES[name]
    return [list(row) for row in function(*arguments)]


def run_in_process(name: str, limit: float) -> dict[str, Any]:
    """Rows of one case in a process of its own, or what it died of."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--case", name]
    result: dict[str, Any] = {"case": name}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return result | {"failed": f"no result after {limit} s", "rows": [], "seconds": limit}
    result["seconds"] = round(time.monotonic() - start, 1)
    if done.returncode:
        return result | {"failed": done.stderr[-1500:], "rows": []}
    return result | {"rows": json.loads(done.stdout.splitlines()[-1])}


def bit_checks(processes: int, only: list[str], limit: float) -> list[dict[str, Any]]:
    """Every case, several at a time."""
    names = [name for name in CASES if any(text in name for text in only)]
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(lambda name: run_in_process(name, limit), names))
    for case in found:
        wrong = [row for row in case["rows"] if row[1]]
        elements = sum(row[2] for row in case["rows"])
        print(
            f"{case['case']}: {len(case['rows'])} checks, {len(wrong)} with mismatches, {elements:,} elements, "
            f"{case['seconds']} s",
            flush=True,
        )
        for what, mismatched, total in wrong[:6]:
            print(f"    {what}: {mismatched} of {total}", flush=True)
        if "failed" in case:
            print(f"    did not run: {case['failed']}", flush=True)
    return found


def summary(case: dict[str, Any]) -> dict[str, Any]:
    """A case without the rows that found nothing."""
    rows = case["rows"]
    counts = {"checks": len(rows), "mismatched": sum(r[1] for r in rows), "elements": sum(r[2] for r in rows)}
    wrong = {"wrong": [row for row in rows if row[1]]} if counts["mismatched"] else {}
    return {key: value for key, value in case.items() if key != "rows"} | counts | wrong


def library(x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """cuDNN's out, dq, dk, dv for [s, b, h, d] operands."""
    leaves = [t.permute(1, 2, 0, 3).contiguous().requires_grad_() for t in x[:3]]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(x[3].permute(1, 2, 0, 3))
    return {
        name: t.permute(2, 0, 1, 3)
        for name, t in zip(("out", "dq", "dk", "dv"), (out, *(t.grad for t in leaves)), strict=True)
    }


def exact(x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """out, dq, dk, dv in float64."""
    q, k, v = (t.double().permute(1, 2, 0, 3).requires_grad_() for t in x[:3])
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
    out = s.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    out.backward(x[3].double().permute(1, 2, 0, 3))
    return {
        name: t.detach().permute(2, 0, 1, 3)
        for name, t in zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), strict=True)
    }


def errors() -> list[dict[str, Any]]:
    """Relative error (Frobenius) against float64, ours and cuDNN's."""
    rows = []
    for d, s in ((128, 512), (128, 2048), (64, 1024)):
        torch.manual_seed(1)
        x = operands(s, 1, 8, 2, d, torch.bfloat16)
        want, theirs, ours = exact(x), library(x), everything(x, whole(s), whole(s))
        row: dict[str, Any] = {"d": d, "S": s}
        for name, reference in want.items():
            for who, got in (("ours", ours), ("cudnn", theirs)):
                difference = (got[name].double() - reference).norm() / reference.norm()
                row[f"{name}_{who}"] = float(f"{difference:.4e}")
            row[f"{name}_ratio"] = round(row[f"{name}_ours"] / row[f"{name}_cudnn"], 4)
        rows.append(row)
        print("error against float64", row, flush=True)
    return rows


def race(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, in turn, with a cold L2."""
    flush = torch.empty(FLUSH, device="cuda", dtype=torch.int8)
    for function in functions.values():
        function()
        function()
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            function()
            stop.record()
            pairs[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in events) for name, events in pairs.items()}


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function as a CUDA graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def candidates(
    s: int, d: int, portable: bool
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Forward and backward, the vendor's and ours; causal, bf16, one sequence."""
    x = operands(s, 1, HEADS, GROUPS, d, torch.bfloat16)
    q, k, v, grad = x
    runs = whole(s)
    theirs = [t.permute(1, 2, 0, 3).contiguous() for t in x]
    aten = torch.ops.aten

    def their_forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(*theirs[:3], None, True, 0.0, True, False)

    kept = their_forward()
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset = kept[:8]

    def their_backward() -> Any:
        return aten._scaled_dot_product_cudnn_attention_backward(
            theirs[3], *theirs[:3], out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        )

    our_out, our_lse = kernel.attention_forward(q, k, v, runs, mask=CAUSAL)
    rows = kernel.attention_statistics(grad, our_out, our_lse)

    def backward(entries: Any = None) -> None:
        statistics_ = kernel.attention_statistics(grad, our_out, our_lse)
        kernel.attention_dq(q, k, v, grad, *statistics_, runs, mask=CAUSAL, entries=entries)
        kernel.attention_dkv(q, k, v, grad, *statistics_, runs, mask=CAUSAL, entries=entries)

    forward = {
        "cudnn": their_forward,
        "ours": lambda: kernel.attention_forward(q, k, v, runs, mask=CAUSAL),
    }
    backwards: dict[str, Callable[[], Any]] = {
        "cudnn": their_backward,
        "ours": backward,
        "statistics": lambda: kernel.attention_statistics(grad, our_out, our_lse),
        "dq": lambda: kernel.attention_dq(q, k, v, grad, *rows, runs, mask=CAUSAL),
        "dkv": lambda: kernel.attention_dkv(q, k, v, grad, *rows, runs, mask=CAUSAL),
    }
    if portable:
        entries = entries_for(architecture(q.device), d)
        flipped = Entries(
            *(
                replace(entry, branch=not entry.branch)
                for entry in (entries.forward, entries.decode, entries.dq, entries.dkv)
            )
        )
        forward["portable"] = lambda: kernel.attention_forward(q, k, v, runs, mask=CAUSAL, entries=entries)
        forward["portable, other masking"] = lambda: kernel.attention_forward(
            q, k, v, runs, mask=CAUSAL, entries=flipped
        )
        backwards["portable, other masking"] = lambda: backward(flipped)
        backwards["portable"] = lambda: backward(entries)
        backwards["portable dq"] = lambda: kernel.attention_dq(
            q, k, v, grad, *rows, runs, mask=CAUSAL, entries=entries
        )
        backwards["portable dkv"] = lambda: kernel.attention_dkv(
            q, k, v, grad, *rows, runs, mask=CAUSAL, entries=entries
        )
    return forward, backwards


def times(head_dims: list[int]) -> list[dict[str, Any]]:
    """Milliseconds and speed against cuDNN."""
    rows = []
    cells = [(128, s) for s in (1024, 2048, 4096, 8192, 16384)] + [(64, 4096), (256, 4096)]
    made = {}
    for d, s in cells:
        if d not in head_dims:
            continue
        try:
            made[d, s] = candidates(s, d, portable=s == 4096)
        except RuntimeError as error:
            print(f"d {d}, S {s}: cuDNN refuses it ({str(error)[:120]}); not timed", flush=True)
    for how in ("eager", "graph"):
        for (d, s), passes in made.items():
            if how == "graph" and (d != 128 or s > 4096):
                continue
            for which, functions in zip(("forward", "backward"), passes, strict=True):
                taken = functions
                if how == "graph":
                    taken = {name: captured(f) for name, f in functions.items() if name in ("cudnn", "ours")}
                ms = race(taken, 9 if s > 8192 else 25)
                flops = 2 * s * s * d * HEADS * (1.0 if which == "forward" else 2.5)
                row = {
                    "pass": which, "how": how, "d": d, "S": s, "tflops_ours": round(flops / ms["ours"] / 1e9),
                    **{f"{name}_ms": round(value, 4) for name, value in ms.items()},
                    **{f"speed_{n}": round(ms["cudnn"] / ms[n], 3) for n in ("ours", "portable") if n in ms},
                }  # fmt: skip
                rows.append(row)
                print(row, flush=True)
    return rows


def packed_times() -> dict[str, Any]:
    """Eight sequences packed against the same ones as a batch: forward and backward together."""
    s, count, d = 2048, 8, 128
    dense = operands(s, count, HEADS, GROUPS, d, torch.bfloat16)
    flat = [t.transpose(0, 1).reshape(s * count, 1, *t.shape[2:]).contiguous() for t in dense]
    runs = tuple(Run(i * s, s, 0, i * s, s) for i in range(count))
    ms = race(
        {
            "dense": lambda: everything(dense, whole(s), whole(s)),
            "packed": lambda: everything(flat, runs, runs),
        },
        15,
    )
    row = {"dense_ms": ms["dense"], "packed_ms": ms["packed"], "speed": ms["dense"] / ms["packed"]}
    print("packed", row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--processes", type=int, default=12, help="cases that run side by side")
    parser.add_argument(
        "--case-seconds", type=float, default=300, help="a case that hangs is ended after them"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256], help="of what is timed")
    parser.add_argument("--case", choices=sorted(CASES), help="run one case here and print its rows as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    if args.case:
        print(json.dumps(run_case(args.case)))
        return
    with json_alone(args.json):
        found = bit_checks(args.processes, args.only, args.case_seconds)
        checks = [row for case in found for row in case["rows"]]
        bad = [row for row in checks if row[1]]
        broken = [case["case"] for case in found if "failed" in case]
        print(
            f"{len(checks)} bit checks, {len(bad)} with mismatches, {sum(row[2] for row in checks):,} elements; "
            f"cases that did not run: {broken or 'none'}",
            flush=True,
        )
        environment = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "hip": torch.version.hip,
            "results": NAMES,
        }
        report: dict[str, Any] = {"environment": environment, "bits": [summary(case) for case in found]}
        stages: dict[str, Callable[[], Any]] = {}
        if torch.version.hip is None:
            stages["errors"] = errors
            if not args.no_times:
                stages |= {"times": lambda: times(args.head_dims), "packed": packed_times}
        for name, stage in stages.items():
            report[name] = stage()
            # After each, so that a run that is cut short leaves what it measured.
            if args.json != "-":
                write_json(args.json, report)
    write_json(args.json, report)
    raise SystemExit(bool(bad or broken))


if __name__ == "__main__":
    main()
