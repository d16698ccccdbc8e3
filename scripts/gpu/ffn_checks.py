"""The FFN on this GPU: the Hopper kernel against the portable one, SwiGLU against its reference, then speed.

    python scripts/gpu/ffn_checks.py [--json [FILE]] [--only bits|times] [--seconds N] [--processes N]

Bits: products of every layout, lane count, tail and tile; SwiGLU on all 65,536 bf16 and fp16 gates. Times: products
against the vendor library, the whole FFN forward and forward plus backward against transformers' Qwen3MLP (hidden 4096,
intermediate 12288), interleaved, random data, cold cache. Cells that would start after N seconds are listed as skipped.
Exit status 1 when an element differs, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemm_checks import median_ms, randn

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.gemm import gated_kernel, ops
from te_overrides.kernels.gemm import kernel as portable
from te_overrides.kernels.gemm.launch_table import launch_for
from te_overrides.kernels.portable_math.reference import silu
from te_overrides.kernels.swiglu import kernel as swiglu_kernel
from te_overrides.kernels.swiglu import narrow
from te_overrides.kernels.swiglu import reference as swiglu_reference
from te_overrides.kernels.tree.reference import balanced_tree

HIDDEN, INTERMEDIATE = 4096, 12288


class Rows:
    """Results of bit checks; prints what differs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def compare(self, name: str, got: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
        """One check; an exception is a failed one."""
        try:
            mismatched, total, first = count_mismatches(got(), want)
            row = {"check": name, "mismatched": mismatched, "total": total}
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            mismatched, first = 1, None
            row = {
                "check": name,
                "mismatched": 1,
                "total": 1,
                "error": f"{type(error).__name__}: {error}"[:300],
            }
        self.rows.append(row | {"first": first} if mismatched else row)


SHAPES = ((300, 520, 1024), (257, 392, 4096), (1000, 1032, 2048))
# Name of a group of checks -> dtype, how the operands lie (K, or the rows first), lanes, packed parts of K.
GROUPS = {
    "one lane": (torch.bfloat16, "KK", 1, 1),
    "two lanes": (torch.bfloat16, "KK", 2, 1),
    "four lanes": (torch.bfloat16, "KK", 4, 1),
    "eight lanes": (torch.bfloat16, "KK", 8, 1),
    "one lane, weight turned": (torch.bfloat16, "KN", 1, 1),
    "eight lanes of two parts, weight turned": (torch.bfloat16, "KN", 8, 2),
    "both turned": (torch.bfloat16, "MN", 1, 1),
    "one lane, fp16": (torch.float16, "KK", 1, 1),
    "eight lanes, fp16": (torch.float16, "KK", 8, 1),
}


def _lie(x: torch.Tensor, along: str) -> torch.Tensor:
    return x if along == "K" else x.t().contiguous().t()


def group_checks(rows: Rows, name: str) -> None:
    """Hopper against portable for one group: every shape, both tile widths; gradients where one lane allows them."""
    from te_overrides.kernels.gemm import hopper

    dtype, lie, count, segments = GROUPS[name]
    for m, n, k in SHAPES:
        if lie[0] == "M" and m % 8:
            continue
        a, b = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype)
        x, y = _lie(a, lie[0]), _lie(b, lie[1])
        if count > 1:
            want = portable.lane_tree(a, b, tp_size=8 // count, segments=[k // segments] * segments)
        else:
            want = portable.one_lane(a, b)
        for block in (128, 256):
            tile = hopper.launch(1 if block == 128 else 10**6, n, count, False, 132)

            def got(x: Any = x, y: Any = y, tile: Any = tile, m: int = m, n: int = n) -> torch.Tensor:
                out = torch.full((m, n), torch.nan, dtype=x.dtype, device="cuda")
                hopper.product(x, y, out, count=count, segments=segments, tile=tile)
                return out

            rows.compare(f"{name} {m}x{n}x{k} BN {tile['BN']}", got, want)
        if lie == "MN":
            gradient_checks(rows, f"{name} {m}x{n}x{k}", x, y, portable.one_lane(a, b, torch.float32), want)
    if lie == "KK" and count == 1:
        a, b = randn(384, 18992, dtype=dtype), randn(264, 18992, dtype=dtype)
        rows.compare(f"{name}, K 18992", lambda: ops.one_lane(a, b), portable.one_lane(a, b))


def gradient_checks(
    rows: Rows, name: str, x: torch.Tensor, y: torch.Tensor, wide: torch.Tensor, want: torch.Tensor
) -> None:
    """Weight gradients: float32, added to float32, rounded with positive zeros."""
    start = torch.randn_like(wide)

    def added() -> torch.Tensor:
        out = start.clone()
        ops.add_one_lane_(out, x, y)
        return out

    rows.compare(f"{name} float32", lambda: ops.one_lane(x, y, torch.float32), wide)
    rows.compare(f"{name} added", added, start + wide)
    rows.compare(f"{name} gradient", lambda: ops.gradient(x, y, x.dtype), want.add(0.0))


def gated_checks(rows: Rows) -> None:
    """The activation behind the product, with and without what it is made of: both kernels, tiles, ragged sizes."""
    from te_overrides.kernels.gemm import hopper_gated

    def compare(
        name: str, got: Callable[[], tuple[torch.Tensor, torch.Tensor | None]], want: Any, packed: Any
    ) -> None:
        rows.compare(name, lambda: got()[0], want)
        if (kept := got()[1]) is not None:
            rows.compare(f"{name}, projections", lambda: kept, packed)

    shapes = (
        (300, 520, 1024),
        (1000, 1032, 2048),
        (520, 4104, 136),
        (7, 520, 1016),
        (40, 264, 1024),
        (64, 1032, 1024),
    )
    for dtype, keep in itertools.product((torch.bfloat16, torch.float16), (True, False)):
        for m, n, k in shapes:
            a, b = randn(m, k, dtype=dtype), randn(2 * n, k, dtype=dtype)
            packed = portable.one_lane(a, b)
            want = swiglu_reference.swiglu_packed(packed)
            name = f"gated {dtype} {m}x{n}x{k} keep {keep}"
            compare(
                f"{name}, portable", lambda a=a, b=b, keep=keep: gated_kernel.gated(a, b, keep), want, packed
            )
            for block in (128, 256) if m > 64 else ():
                tile = hopper_gated.launch(1 if block == 128 else 10**6, n, 132)

                def got(
                    tile: Any = tile,
                    a: Any = a,
                    b: Any = b,
                    like: Any = want,
                    keep: bool = keep,
                    packed: Any = packed,
                ) -> tuple[torch.Tensor, torch.Tensor | None]:
                    out = torch.full_like(like, torch.nan)
                    kept = torch.full_like(packed, torch.nan) if keep else None
                    hopper_gated.gated(a, b, out, kept, tile=tile)
                    return out, kept

                compare(f"{name} BN {block}", got, want, packed)


@triton.jit
def window_kernel(gate, up, high, low, inside, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ends = narrow.window(tl.load(gate + at).to(tl.float32), tl.load(up + at).to(tl.float32))
    tl.store(high + at, ends[0])
    tl.store(low + at, ends[1])
    tl.store(inside + at, ends[2])


def window_checks(rows: Rows) -> None:
    """The float32 product lies inside `narrow`'s window, for every gate and 64 magnitudes of the other factor."""
    for dtype in (torch.bfloat16, torch.float16):
        gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).repeat(64)
        up = torch.randn(64, 2**16, device="cuda").mul_(torch.logspace(-3, 3, 64, device="cuda")[:, None])
        up = up.flatten().to(dtype)
        ends = torch.empty(3, gate.numel(), device="cuda")
        window_kernel[(gate.numel() // 1024,)](gate, up, *ends, BLOCK=1024)
        want = silu(gate.float()) * up.float()
        decided = ends[2] >= narrow.SMALLEST
        outside = decided & ~((torch.minimum(*ends[:2]) <= want) & (want <= torch.maximum(*ends[:2])))
        middle = (ends[0].double() + ends[1].double()) / 2
        share = ((want - middle).abs() / (ends[0].double() - ends[1].double()).abs() * 2)[
            decided & want.isfinite()
        ]
        print(
            f"window {dtype}: the product uses {share.max():.3f} of its half, {decided.float().mean():.4f} decided"
        )
        rows.compare(
            f"window {dtype}",
            lambda x=outside: x.to(torch.uint8),
            torch.zeros_like(outside, dtype=torch.uint8),
        )


def model_checks(rows: Rows) -> None:
    """The FFN's own shapes: any number of rows against the batch they come from, TP shards, repeats."""
    x, w = randn(2048, HIDDEN), randn(2 * INTERMEDIATE, HIDDEN)
    h, down = randn(2048, INTERMEDIATE), randn(HIDDEN, INTERMEDIATE)
    whole = {"gate and up": portable.one_lane(x, w), "down": portable.lane_tree(h, down, tp_size=1)}
    rows.compare("gate and up, 2048 rows", lambda: ops.one_lane(x, w), whole["gate and up"])
    rows.compare("down, 2048 rows", lambda: ops.lane_tree(h, down, tp_size=1), whole["down"])
    for m in (1, 8, 31, 33, 65, 127, 1000):
        rows.compare(f"gate and up, {m} rows", lambda m=m: ops.one_lane(x[:m], w), whole["gate and up"][:m])
        rows.compare(f"down, {m} rows", lambda m=m: ops.lane_tree(h[:m], down, tp_size=1), whole["down"][:m])
    for tp in (2, 4, 8):
        width = INTERMEDIATE // tp

        def joined(tp: int = tp, width: int = width) -> torch.Tensor:
            cuts = [slice(r * width, (r + 1) * width) for r in range(tp)]
            return balanced_tree([ops.lane_tree(h[:, c], down[:, c], tp_size=tp) for c in cuts])

        rows.compare(f"down, joined from TP={tp}", joined, whole["down"])
    for _ in range(20):
        rows.compare("down, again", lambda: ops.lane_tree(h, down, tp_size=1), whole["down"])


def run_group(name: str) -> list[dict[str, Any]]:
    """Rows of one group, in this process."""
    rows = Rows()
    if name == "swiglu":
        swiglu_checks(rows)
        window_checks(rows)
    elif name == "gated":
        gated_checks(rows)
    elif name == "model":
        model_checks(rows)
    else:
        group_checks(rows, name)
    return rows.rows


def bit_checks(processes: int, seconds: float) -> list[dict[str, Any]]:
    """All groups, each in a process of its own, since compiling is what takes the time. A group that fails is a row."""
    waiting, running, found = ["model", "swiglu", "gated", *GROUPS], dict[str, Any](), []
    deadline = time.monotonic() + seconds
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            command = [sys.executable, __file__, "--group", name]
            running[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        for name, process in list(running.items()):
            if process.poll() is None and time.monotonic() < deadline:
                continue
            process.kill()
            output, errors = process.communicate()
            del running[name]
            lines = output.splitlines()
            if process.returncode or not lines:
                found.append(
                    {"check": name, "mismatched": 1, "total": 1, "error": errors[-600:] or "the time was up"}
                )
            else:
                found += json.loads(lines[-1])
        time.sleep(0.1)
    for row in found:
        if row["mismatched"]:
            print(row, flush=True)
    return found


def swiglu_checks(rows: Rows) -> None:
    """All gates, forward and backward."""
    for dtype in (torch.bfloat16, torch.float16):
        gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).repeat(8)
        up, grad = (randn(gate.numel(), dtype=dtype) * 4 for _ in range(2))
        packed, grad = torch.stack([gate, up]).view(2, 512, -1).transpose(0, 1).flatten(1), grad.view(512, -1)
        rows.compare(
            f"swiglu {dtype}",
            lambda p=packed: swiglu_kernel.swiglu_packed(p),
            swiglu_reference.swiglu_packed(packed),
        )
        rows.compare(
            f"swiglu backward {dtype}",
            lambda p=packed, g=grad: swiglu_kernel.swiglu_packed_backward(g, p),
            swiglu_reference.swiglu_packed_backward(grad, packed),
        )


def qwen() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Qwen3MLP and its weights as [gate; up] and down."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    config = Qwen3Config(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, hidden_act="silu")
    module = Qwen3MLP(config).to("cuda", torch.bfloat16)
    packed = torch.cat([module.gate_proj.weight, module.up_proj.weight]).detach().contiguous()
    return module, packed, module.down_proj.weight.detach().contiguous()


def ffn(x: torch.Tensor, w: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Forward of the contract's FFN for training: the projections are kept."""
    h, packed = ops.gated(x, w, keep=True)
    assert packed is not None
    return ops.lane_tree(h, down, tp_size=1), packed, h


def ffn_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    down: torch.Tensor,
    packed: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """dX and both weight gradients."""
    dh = ops.one_lane(grad, down.t())
    d_down = ops.gradient(grad.t(), h.t(), grad.dtype)
    d_packed = swiglu_kernel.swiglu_packed_backward(dh, packed)
    dx = ops.lane_tree(d_packed, w.t(), tp_size=1, segments=[INTERMEDIATE, INTERMEDIATE])
    return dx, ops.gradient(d_packed.t(), x.t(), grad.dtype), d_down


def times(deadline: float) -> list[dict[str, Any]]:
    """Products and the FFN; every cell says what it compared."""
    found: list[dict[str, Any]] = []

    def cell(name: str, functions: dict[str, Callable[[], Any]], repeats: int = 15) -> None:
        if time.monotonic() > deadline:
            found.append({"cell": name, "skipped": "the time was up"})
            return
        try:
            ms = median_ms(functions, repeats)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            AssertionError,
            triton.runtime.errors.TritonError,
        ) as error:
            found.append({"cell": name, "error": f"{type(error).__name__}: {error}"[:300]})
            print(found[-1], flush=True)
            return
        first = next(iter(ms.values()))
        found.append({"cell": name, "ms": ms, "ratio": {k: v / first for k, v in ms.items()}})
        print(name, {k: f"{v:.4f} ({v / first:.3f})" for k, v in ms.items()}, flush=True)

    module, w, down = qwen()
    for m in (4096, 2048, 8192, 512, 1, 8, 32):
        times_of(cell, m, module, w, down)
    for m in (8, 1, 32):
        small_tiles(cell, m, randn(m, HIDDEN), randn(m, INTERMEDIATE), w, down)
    return found


def times_of(cell: Any, m: int, module: Any, w: torch.Tensor, down: torch.Tensor) -> None:
    """The cells of one number of rows."""
    x, h, grad = randn(m, HIDDEN), randn(m, INTERMEDIATE), randn(m, HIDDEN)
    linear = torch.nn.functional.linear
    with torch.no_grad():
        cell(f"gate and up, M={m}", {
            "cuBLAS": lambda: linear(x, w), "ours": lambda: ops.one_lane(x, w),
            "with SwiGLU": lambda: ops.gated(x, w, keep=False), "with SwiGLU, kept": lambda: ops.gated(x, w, keep=True),
            "portable": lambda: portable.one_lane(x, w),
            "portable, with SwiGLU": lambda: gated_kernel.gated(x, w, False),
        })  # fmt: skip
        cell(f"down, M={m}", {
            "cuBLAS": lambda: linear(h, down), "tree": lambda: ops.lane_tree(h, down, tp_size=1),
            "one lane": lambda: ops.one_lane(h, down),
            "portable tree": lambda: portable.lane_tree(h, down, tp_size=1),
        })  # fmt: skip
        cell(f"FFN forward, M={m}", {
            "Qwen3MLP": lambda: module(x), "two cuBLAS": lambda: linear(linear(x, w)[:, :INTERMEDIATE], down),
            "ours": lambda: ops.lane_tree(ops.gated(x, w, keep=False)[0], down, tp_size=1),
            "ours, CUDA graph": graph(lambda: ops.lane_tree(ops.gated(x, w, keep=False)[0], down, tp_size=1)),
            "Qwen3MLP, CUDA graph": graph(lambda: module(x)),
        })  # fmt: skip
    packed, hidden = ffn(x, w, down)[1:]
    leaf = x.clone().requires_grad_()

    def theirs(leaf: torch.Tensor = leaf, grad: torch.Tensor = grad) -> None:
        module.zero_grad(set_to_none=True)
        leaf.grad = None
        module(leaf).backward(grad)

    def ours(x: torch.Tensor = x, grad: torch.Tensor = grad) -> None:
        _, packed, h = ffn(x, w, down)
        ffn_backward(grad, x, w, down, packed, h)

    cell(f"FFN forward and backward, M={m}", {"Qwen3MLP": theirs, "ours": ours}, 9)
    cell(f"parts of backward, M={m}", {
        "cuBLAS dH": lambda: grad @ down, "dH": lambda: ops.one_lane(grad, down.t()),
        "cuBLAS dW": lambda: packed.t() @ x, "dW": lambda: ops.gradient(packed.t(), x.t(), x.dtype),
        "cuBLAS dX": lambda: packed @ w,
        "dX": lambda: ops.lane_tree(packed, w.t(), tp_size=1, segments=[INTERMEDIATE] * 2),
        "SwiGLU": lambda: swiglu_kernel.swiglu_packed(packed),
        "SwiGLU backward": lambda: swiglu_kernel.swiglu_packed_backward(hidden, packed),
    }, 7)  # fmt: skip


def graph(function: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph: without the host's time."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        function()
    return captured.replay


def small_tiles(cell: Any, m: int, x: Any, h: Any, w: Any, down: Any) -> None:
    """Tiles of the portable kernel for few rows, bound by reading the weights."""
    arch = architecture(x.device)
    base = launch_for(arch, "one_lane", m)
    variants = {
        f"{n}x{k} w{warps} s{stages}": replace(base, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
        for n, k, warps, stages in (
            (32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 4, 6), (32, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 6),
            (32, 256, 8, 3), (16, 256, 4, 5),
        )
    }  # fmt: skip
    cell(
        f"gate and up tiles, M={m}",
        {k: lambda e=e: gated_kernel.gated(x, w, False, entry=e) for k, e in variants.items()},
        9,
    )
    cell(
        f"down tiles, M={m}",
        {k: lambda e=e: portable.lane_tree(h, down, tp_size=1, entry=e) for k, e in variants.items()},
        9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--only", choices=("bits", "times"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--group", help="run this group of bit checks here and print its rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    deadline = time.monotonic() + args.seconds
    torch.manual_seed(0)
    if args.group is not None:
        print(json.dumps(run_group(args.group)))
        return
    with json_alone(args.json):
        rows = [] if args.only == "times" else bit_checks(args.processes, args.seconds)
        bad = [row for row in rows if row["mismatched"]]
        total = sum(row["total"] for row in rows)
        print(f"{len(rows)} bit checks, {len(bad)} with mismatches, {total:,} elements", flush=True)
        found = times(deadline) if args.only != "bits" and not bad else []
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "bits": rows, "times": found,
    }  # fmt: skip
    write_json(args.json, report)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
