"""The LSE merge and portable math on this GPU: bits first, then speed.

    python scripts/gpu/lse_merge_checks.py [CHECK …] [--json [FILE]] [--te-sources DIR] [--quick]

Checks, in this order; a broken one ends with exit status 1, and no speed is measured after it:

    functions   every portable function as Triton kernel against the torch reference on this GPU, all 2^32 inputs
    host        the kernels against the references on the host's CPU: functions, and every form of the merge
    launches    one merge in 48 launch configurations: number of different results
    fuzz        10^8 pairs of LSEs: the reference's bits, and the contract (docs/numbers.md, "LSE merge")
    history     the same operands after other shapes, under torch.compile, on a side stream
    speed       the fused pass and the separate functions against a device copy, against upstream's compiled functions
                (with --te-sources: an unpacked TransformerEngine wheel), and against the float64 rate of this GPU

--quick takes a 64th of `functions` and a tenth of `fuzz`, and says so. Exit status 2 without a GPU. The error of the
reference itself over all inputs is measured by portable_math_exhaustive.py.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_plugins.verify.outputs import add_json, write_json
from te_overrides.kernels.bits import count_mismatches, differing
from te_overrides.kernels.lse_merge import ops, reference
from te_overrides.kernels.portable_math import reference as portable

FUNCTIONS = ("exp", "exp2", "log", "log1p", "sigmoid", "silu", "rsqrt", "cos", "sin")
CHUNK = 1 << 25
PAIRS = 100_000_000
HEADS, D = 32, 128
MEGABYTES = (4, 16, 64, 256, 1024)


class Broken(Exception):
    """A check found other bits than the contract's."""


def require_none(mismatched: int, what: str) -> None:
    """Raise Broken if anything differs."""
    if mismatched:
        raise Broken(f"{what}: {mismatched} elements differ")


def elementwise_kernel() -> Any:
    """A Triton kernel that applies one portable function."""
    import triton
    import triton.language as tl

    @triton.jit
    def apply(x_ptr, out_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i)))

    return apply


def functions(quick: bool) -> dict[str, Any]:
    """Triton against the torch reference on this GPU over all float32 inputs."""
    from te_overrides.kernels.portable_math import kernel as math_kernel

    apply, rows = elementwise_kernel(), {}
    starts = range(-(2**31), 2**31, CHUNK * (64 if quick else 1))
    for name in FUNCTIONS:
        start_time, mismatched = time.monotonic(), 0
        for start in starts:
            bits = torch.arange(start, start + CHUNK, device="cuda", dtype=torch.int64)
            x = bits.to(torch.int32).view(torch.float32)
            got = torch.empty_like(x)
            apply[(CHUNK // 1024,)](
                x, got, getattr(math_kernel, name), 1024, num_warps=4, enable_fp_fusion=False
            )
            mismatched += int(differing(got, getattr(portable, name)(x)).sum())
        rows[name] = {"mismatched": mismatched, "total": len(starts) * CHUNK}
        print(f"  {name}: {rows[name]} ({time.monotonic() - start_time:.1f} s)", file=sys.stderr, flush=True)
        require_none(mismatched, f"{name} as Triton kernel against the reference")
    return rows


def lse_pair(count: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of LSEs: ordinary, far apart, nearly equal, huge, and every pair of special values."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator, device=device) * scale

    kind = torch.randint(0, 8, (count,), generator=generator, device=device)
    lse, step = normal(6), normal(6)
    step = torch.where(kind == 1, lse + normal(1e-3), step)
    step = torch.where(kind == 2, normal(60), step)
    lse, step = (torch.where(kind == 3, normal(1e5), x) for x in (lse, step))
    lse, step = (torch.where(kind == 4, normal(1e-30), x) for x in (lse, step))
    special = torch.tensor(
        [0.0, -0.0, 1.0, 1e4, -1e4, 89.0, 800.0, -49993.98, 1e-45, torch.inf, -torch.inf, torch.nan],
        device=device,
    )
    pick = torch.randint(0, len(special), (2, count), generator=generator, device=device)
    lse = torch.where((kind == 5) | (kind == 7), special[pick[0]], lse)
    step = torch.where((kind == 6) | (kind == 7), special[pick[1]], step)
    return lse, step


def fuzz(quick: bool) -> dict[str, Any]:
    """Bits of the reference, and the contract by itself, on many pairs."""
    total, chunk, breaks = PAIRS // (10 if quick else 1), 1 << 24, 0
    rows: dict[str, int] = dict.fromkeys(("bits", "symmetry", "special", "error"), 0)
    for index, start in enumerate(range(0, total, chunk)):
        lse, step = lse_pair(min(chunk, total - start), index, "cuda")
        got, swapped = lse.clone(), step.clone()
        ops.merge_lse_(got, step)
        ops.merge_lse_(swapped, lse)
        rows["bits"] += int(differing(got, reference.merged_lse(lse, step)).sum())
        rows["symmetry"] += int(differing(got, swapped).sum())
        a, b = (torch.where(x == torch.inf, -torch.inf, x.double()) for x in (lse, step))
        undefined, empty = a.isnan() | b.isnan(), (a == -torch.inf) & (b == -torch.inf)
        rows["special"] += int((got.isnan() != undefined).sum() + ((got == -torch.inf) != empty).sum())
        # The library's own float64 merge: good to a few units of float64's last place.
        exact = torch.logaddexp(a, b)
        ordinary = ~(undefined | empty)
        unit = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact).exponent - 24).clamp(min=-149))
        size = torch.maximum(a.abs(), b.abs()).clamp(min=1.0).nan_to_num(posinf=1.0)
        bound = 0.501 * unit + 2.0**-50 * size
        rows["error"] += int((ordinary & ((got.double() - exact).abs() > bound)).sum())
    for name, count in rows.items():
        breaks += count
        require_none(count, f"fuzzed pairs, {name}")
    return {"pairs": total, "breaks": breaks, **rows}


def operands(seq_dim: int, dtype: torch.dtype, s: int = 512, d: int = D) -> list[torch.Tensor]:
    """out, step output, lse, step lse on the host; rows without keys among them."""
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(2, 8, s, generator=generator) * 6 for _ in range(2))
    step[0, 0, : s // 4], lse[0, 0, s // 8 : s // 2], step[1, 1, :10] = -torch.inf, -torch.inf, torch.inf
    shape = (s, 2, 8, d) if seq_dim == 0 else (2, s, 8, d)
    return [*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)), lse, step]


def every_form(
    module: Any,
    out: torch.Tensor,
    step_out: torch.Tensor,
    lse: torch.Tensor,
    step: torch.Tensor,
    seq_dim: int,
) -> dict[str, torch.Tensor]:
    """What every form makes of the same operands."""
    s = lse.shape[-1]
    split = (*out.shape[:seq_dim], 2, s // 2, *out.shape[seq_dim + 1 :])
    half_out, half_lse = step_out.narrow(seq_dim, s // 2, s // 2), step[..., s // 2 :]
    results = {"merge_lse_": lse.clone(), "merge_second_half_lse_": lse.clone()}
    module.merge_lse_(results["merge_lse_"], step)
    module.merge_second_half_lse_(results["merge_second_half_lse_"].view(*lse.shape[:-1], 2, -1), half_lse)
    new = results["merge_lse_"]
    results["out_correction_init"] = module.out_correction_init(step_out, new, step, seq_dim)
    for form, view, arguments in (
        ("out_correction_", out.shape, (step_out, new, step)),
        ("incremental_out_correction_", out.shape, (step_out, lse, new, step)),
        ("second_half_out_correction_", split, (half_out, new, half_lse)),
        ("incremental_second_half_out_correction_", split, (half_out, lse, new, half_lse)),
    ):
        results[form] = out.clone()
        getattr(module, form)(results[form].view(view), *arguments, seq_dim)
    results["merge_ out"], results["merge_ lse"] = out.clone(), lse.clone()
    module.merge_(results["merge_ out"], results["merge_ lse"], step_out, step, seq_dim)
    return results


def host(quick: bool) -> dict[str, Any]:
    """This GPU against the CPU of its host."""
    compared = 0
    for seq_dim, dtype, wide in itertools.product(
        (0, 1), (torch.float32, torch.bfloat16, torch.float16), (False, True)
    ):
        out, step_out, lse, step = operands(seq_dim, dtype)
        lse = lse.double() if wide else lse
        want = every_form(reference, out, step_out, lse, step, seq_dim)
        got = every_form(ops, *(x.cuda() for x in (out, step_out, lse, step)), seq_dim)
        for name, x in got.items():
            mismatched, total, _ = count_mismatches(x.cpu(), want[name])
            compared += total
            require_none(mismatched, f"{name}, seq_dim {seq_dim}, {dtype}, LSE {lse.dtype}, against the host")
    lse, step = lse_pair(1 << 22, 1, "cpu")
    got = lse.cuda()
    ops.merge_lse_(got, step.cuda())
    require_none(
        count_mismatches(got.cpu(), reference.merged_lse(lse, step))[0], "fuzzed pairs against the host"
    )
    for name in FUNCTIONS:
        function = getattr(portable, name)
        require_none(
            count_mismatches(function(lse.cuda()).cpu(), function(lse))[0], f"{name} against the host"
        )
    return {"mismatched": 0, "total": compared + lse.numel() * (1 + len(FUNCTIONS))}


def launches(quick: bool) -> dict[str, Any]:
    """The number of different results over launch configurations: one, if the launch cannot matter."""
    from te_overrides.kernels.lse_merge.lse_kernel import merge_kernel

    lse, step = lse_pair(225_280, 2, "cuda")
    results = []
    for block, warps in itertools.product((32, 64, 128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16, 32)):
        got = lse.clone()
        blocks = -(-lse.numel() // block)
        merge_kernel[(blocks,)](
            got, step, 0, 0, 1, 0, 0, 1, 1, lse.numel(), blocks,
            BLOCK=block, num_warps=warps, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        results.append(got)
    groups: list[torch.Tensor] = []
    for result in results:
        if all(bool(differing(result, other).any()) for other in groups):
            groups.append(result)
    require_none(len(groups) - 1, f"{len(results)} launch configurations")
    return {"configurations": len(results), "groups": len(groups)}


def history(quick: bool) -> dict[str, Any]:
    """Other shapes in between, an outer torch.compile, a busy side stream."""
    generator = torch.Generator("cuda").manual_seed(0)
    lse, step = (torch.randn(2, 8, 4096, generator=generator, device="cuda") * 3 for _ in range(2))

    def merged(function: Callable[..., None] = ops.merge_lse_) -> torch.Tensor:
        out = lse.clone()
        function(out, step)
        return out

    first = merged()
    for shape in ((2, 8, 2048), (1, 8, 511), (36, 13056), (7,), (3, 5, 2, 64), (1, 1, 1), (4096, 9)):
        other = torch.randn(shape, generator=generator, device="cuda")
        ops.merge_lse_(other, other.clone())
    require_none(count_mismatches(merged(), first)[0], "the first shape after others")
    compiled = torch.compile(lambda out, step: ops.merge_lse_(out, step), fullgraph=True)
    require_none(count_mismatches(merged(compiled), first)[0], "under torch.compile")
    stream, busy, wrong = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda"), 0
    for _ in range(100):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy @ busy
            out = merged()
        torch.cuda.current_stream().wait_stream(stream)
        wrong += count_mismatches(out, first)[0]
    require_none(wrong, "on a side stream, 100 repeats")
    return {"mismatched": 0, "repeats on a side stream": 100}


def float64_rate() -> float:
    """float64 multiplies or adds per second that this GPU reaches, measured."""
    import triton
    import triton.language as tl

    @triton.jit
    def chains(out_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        a = i.to(tl.float64)
        b, c, d = a + 1.0, a + 2.0, a + 3.0
        for _ in range(ROUNDS):
            a, b, c, d = a * 0.999, b * 0.998, c * 0.997, d * 0.996
            a, b, c, d = a + 0.5, b + 0.25, c + 0.125, d + 0.75
        tl.store(out_ptr + i, a + b + c + d)

    rounds, block, programs = 512, 256, 132 * 64
    out = torch.empty(block * programs, dtype=torch.float64, device="cuda")

    def run() -> None:
        chains[(programs,)](out, rounds, block, num_warps=4, enable_fp_fusion=False)

    return 8.0 * rounds * block * programs / (bench(run) * 1e-3)


def bench(function: Callable[[], Any]) -> float:
    """Median milliseconds of one call, the cache cleared in between."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=20, rep=100, return_mode="median"))


def merge_float64_operations() -> float | None:
    """float64 instructions of one merged element, counted in the machine code; None if it cannot be shown."""
    from te_overrides.kernels.lse_merge import kernel
    from te_overrides.kernels.lse_merge.lse_kernel import merge_kernel

    lse = torch.zeros(kernel.MERGE_BLOCK, device="cuda")
    compiled = merge_kernel[(1,)](
        lse, lse.clone(), 0, 0, 1, 0, 0, 1, 1, lse.numel(), 1,
        BLOCK=kernel.MERGE_BLOCK, **kernel.options(kernel.MERGE_THREADS),
    )  # fmt: skip
    try:
        text = compiled.asm["sass"] if "cubin" in compiled.asm else compiled.asm["amdgcn"]
    except (OSError, RuntimeError) as error:
        print(f"  machine code not shown ({error}); no float64 roof", file=sys.stderr)
        return None
    found = re.findall(r"\bD(?:ADD|MUL|FMA|SETP|MNMX)\b|\bv_(?:add|mul|fma|fmac|cmp\w*)_f64", text)
    return len(found) / (kernel.MERGE_BLOCK / kernel.MERGE_THREADS)


def upstream_functions(sources: Path | None) -> Any:
    """TransformerEngine's own context_parallel module, its functions compiled as it compiles them; None without."""
    if sources is None:
        return None
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron_plugins.verify.model import te_on_cpu

    return te_on_cpu.load(sources)


def speed(quick: bool, sources: Path | None = None) -> dict[str, Any]:
    """Milliseconds and shares of copy bandwidth and of the float64 rate."""
    upstream, rate = upstream_functions(sources), float64_rate()
    operations = merge_float64_operations()
    roof = None if operations is None else operations / rate
    rows = []
    for megabytes in MEGABYTES:
        rows.append(speed_of(megabytes, upstream, roof))
        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return {
        "launches_of_the_output_pass": launches_of_the_output_pass(),
        "float64_operations_per_second": rate,
        "float64_operations_per_merged_element": operations,
        "upstream": "not run: no --te-sources" if sources is None else str(sources.name),
        "rows": rows,
    }


def launches_of_the_output_pass() -> dict[str, float]:
    """Milliseconds of the fused merge at 256 MB by rows and threads of a program; the bits do not depend on them."""
    from te_overrides.kernels.launching import Plans
    from te_overrides.kernels.lse_merge import kernel

    s = 256 * 2**20 // (2 * HEADS * D)
    out, step_out = (torch.randn(1, s, HEADS, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lse, step = (torch.randn(1, HEADS, s, device="cuda") for _ in range(2))
    chosen, found = (kernel.OUT_ROWS, kernel.OUT_THREADS), {}
    for rows, threads in ((8, 64), (16, 128), (32, 128), (32, 256), (64, 256)):
        kernel.OUT_ROWS, kernel.OUT_THREADS = rows, threads
        kernel._plans = Plans()
        found[f"{rows} rows, {threads} threads"] = bench(lambda: ops.merge_(out, lse, step_out, step, 1))
    kernel.OUT_ROWS, kernel.OUT_THREADS = chosen
    kernel._plans = Plans()
    return found


def speed_of(megabytes: int, upstream: Any, roof: float | None) -> dict[str, float]:
    """One output size, [1, s, 32, 128] bf16; `roof`: seconds that float64 arithmetic alone takes for an element."""
    s = megabytes * 2**20 // (2 * HEADS * D)
    out, step_out = (torch.randn(1, s, HEADS, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lse, step = (torch.randn(1, HEADS, s, device="cuda") for _ in range(2))
    old, scratch = lse.clone(), torch.empty_like(out)
    # An LSE of the same number of bytes as the output, for the separate merge.
    long_lse, long_step = (torch.randn(HEADS, s * D // 2, device="cuda") for _ in range(2))
    out_bytes, lse_bytes = out.nbytes, lse.nbytes
    copy_ms = bench(lambda: scratch.copy_(out))
    copy_rate = 2 * out_bytes / copy_ms
    row = {"megabytes": megabytes, "copy_ms": copy_ms}

    def add(name: str, function: Callable[[], Any], moved: int) -> float:
        row[f"{name}_ms"] = bench(function)
        row[f"{name}_of_copy_bandwidth"] = moved / row[f"{name}_ms"] / copy_rate
        return row[f"{name}_ms"]

    fused = add("fused", lambda: ops.merge_(out, lse, step_out, step, 1), 3 * out_bytes + 3 * lse_bytes)
    ours_out = add(
        "out_correction", lambda: ops.incremental_out_correction_(out, step_out, old, lse, step, 1),
        3 * out_bytes + 3 * lse_bytes,
    )  # fmt: skip
    ours_lse = add("lse", lambda: ops.merge_lse_(long_lse, long_step), 3 * long_lse.nbytes)
    if roof is not None:
        row["lse_of_roof"] = max(long_lse.numel() * roof * 1e3, 3 * long_lse.nbytes / copy_rate) / ours_lse
    if upstream is not None:
        theirs_lse = add(
            "upstream_lse", lambda: upstream.flash_attn_fwd_softmax_lse_correction(long_lse, long_step),
            3 * long_lse.nbytes,
        )  # fmt: skip
        theirs_out = add(
            "upstream_out_correction",
            lambda: upstream.flash_attn_fwd_incremental_out_correction(out, step_out, old, lse, step, 1),
            3 * out_bytes + 3 * lse_bytes,
        )

        def pair() -> None:
            upstream.flash_attn_fwd_softmax_lse_correction(lse, step)
            upstream.flash_attn_fwd_incremental_out_correction(out, step_out, old, lse, step, 1)

        row["upstream_pair_ms"] = bench(pair)
        row["fused_speedup"] = row["upstream_pair_ms"] / fused
        row["lse_speedup"], row["out_correction_speedup"] = theirs_lse / ours_lse, theirs_out / ours_out
    return row


CHECKS = {
    "functions": functions,
    "host": host,
    "launches": launches,
    "fuzz": fuzz,
    "history": history,
    "speed": speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", default=list(CHECKS), metavar="CHECK")
    add_json(parser)
    parser.add_argument("--te-sources", type=Path, metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"unknown check {sorted(unknown)}; known: {list(CHECKS)}")
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    import triton

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "quick": args.quick, "checks": {},
    }  # fmt: skip
    broken = ""
    for name in (name for name in CHECKS if name in args.checks):
        start = time.monotonic()
        options = {"sources": args.te_sources} if name == "speed" else {}
        try:
            report["checks"][name] = CHECKS[name](args.quick, **options)
        except Broken as error:
            broken = str(error)
            report["checks"][name] = {"broken": broken}
            break
        finally:
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    write_json(args.json or "-", report)
    if broken:
        print(f"BROKEN: {broken}", file=sys.stderr)
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
