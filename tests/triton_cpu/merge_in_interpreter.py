"""Runs the Triton kernels in Triton's interpreter and prints, as JSON, mismatches against the references.

Started by tests as a process of its own with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import json
import math
import warnings

import torch
import triton
import triton.language as tl

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.lse_merge import kernel, reference
from te_overrides.kernels.portable_math import kernel as math_kernel
from te_overrides.kernels.portable_math import reference as math_reference

FUNCTIONS = ("exp", "exp2", "log", "log1p", "sigmoid", "silu", "rsqrt", "cos", "sin")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 89.0, -800.0, 1e4, -49993.98, 1e-45, math.inf, -math.inf, math.nan]


@triton.jit
def elementwise(x_ptr, out_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = FUNCTION(x[i])."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i, mask=i < n, other=1.0)), mask=i < n)


@triton.jit
def in_float32(x):
    """What the contract forbids: the library's function, in float32."""
    return tl.log(x + 1.0)


def mathematics() -> dict[str, list[int]]:
    """Function -> [mismatches, elements] over random bit patterns, ordinary numbers and special values."""
    generator = torch.Generator().manual_seed(0)
    patterns = (
        torch.randint(-(2**31), 2**31, (1 << 15,), generator=generator).to(torch.int32).view(torch.float32)
    )
    x = torch.cat([patterns, torch.randn(1 << 14, generator=generator) * 30, torch.tensor(SPECIAL)])
    counts = {}
    for name in FUNCTIONS:
        got = torch.empty_like(x)
        elementwise[(triton.cdiv(x.numel(), 8192),)](x, got, x.numel(), getattr(math_kernel, name), 8192)
        counts[name] = list(count_mismatches(got, getattr(math_reference, name)(x))[:2])
    got = torch.empty_like(x)
    elementwise[(triton.cdiv(x.numel(), 8192),)](x, got, x.numel(), in_float32, 8192)
    counts["mutant"] = list(count_mismatches(got, math_reference.log1p(x))[:2])
    return counts


def lse_pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, h, s] accumulated and step LSE, every pair of special values among them."""
    generator = torch.Generator().manual_seed(1)
    lse, step = (torch.randn(2, 3, 200, generator=generator) * 6 for _ in range(2))
    pairs = torch.tensor([(a, b) for a in SPECIAL for b in SPECIAL])
    lse.view(-1)[: len(pairs)], step.view(-1)[: len(pairs)] = pairs[:, 0], pairs[:, 1]
    return lse.to(dtype), step


def merges() -> dict[str, list[int]]:
    """Form, layout and dtype -> [mismatches, elements] of LSE and output together."""
    counts: dict[str, list[int]] = {}

    def compare(name: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        found = [count_mismatches(got, want)[:2] for got, want in pairs]
        counts[name] = [sum(c[0] for c in found), sum(c[1] for c in found)]

    generator = torch.Generator().manual_seed(2)
    for lse_dtype in (torch.float32, torch.float64):
        lse, step = lse_pairs(lse_dtype)
        for layout, arrange in (
            ("contiguous", lambda x: x.clone()),
            ("transposed", lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)),
            ("packed", lambda x: x[0].clone()),
            (
                "four dimensions, strided",
                lambda x: x.unflatten(2, (50, 4)).transpose(1, 2).contiguous().transpose(1, 2),
            ),
        ):
            got, want, other = arrange(lse), arrange(lse), arrange(step)
            kernel.merge_lse_(got, other)
            reference.merge_lse_(want, other)
            compare(f"merge_lse_ {layout} {lse_dtype}", [(got, want)])
        turned = step.transpose(0, 2).contiguous().transpose(0, 2)
        got, want = lse.clone(), lse.clone()
        kernel.merge_lse_(got, turned)
        reference.merge_lse_(want, turned)
        compare(f"merge_lse_ contiguous with transposed {lse_dtype}", [(got, want)])
        got, want = lse.clone(), lse.clone()
        for module, target in ((kernel, got), (reference, want)):
            module.merge_second_half_lse_(target.view(2, 3, 2, 100), step[..., 100:])
        compare(f"merge_second_half_lse_ {lse_dtype}", [(got, want)])
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            for seq_dim, d in ((0, 8), (1, 24)):
                shape = (200, 2, 3, d) if seq_dim == 0 else (2, 200, 3, d)
                out, step_out = (torch.randn(shape, generator=generator).to(out_dtype) for _ in range(2))
                name = f"seq_dim={seq_dim} d={d} {out_dtype} LSE {lse_dtype}"
                corrections(compare, name, out, step_out, lse, step, seq_dim)
    return counts


def corrections(compare, name, out, step_out, lse, step, seq_dim) -> None:  # noqa: ANN001
    """Every form of the output correction, kernel against reference."""
    new = reference.merged_lse(lse, step)
    got, want = (m.out_correction_init(step_out, new, step, seq_dim) for m in (kernel, reference))
    assert got.stride() == want.stride()
    compare(f"out_correction_init {name}", [(got, want)])
    split = (*out.shape[:seq_dim], 2, 100, *out.shape[seq_dim + 1 :])
    half, half_lse = step_out.narrow(seq_dim, 100, 100), step[..., 100:]
    for form, view, arguments in (
        ("out_correction_", out.shape, (step_out, new, step)),
        ("incremental_out_correction_", out.shape, (step_out, lse, new, step)),
        ("second_half_out_correction_", split, (half, new, half_lse)),
        ("incremental_second_half_out_correction_", split, (half, lse, new, half_lse)),
    ):
        got, want = out.clone(), out.clone()
        for module, target in ((kernel, got), (reference, want)):
            getattr(module, form)(target.view(view), *arguments, seq_dim)
        compare(f"{form} {name}", [(got, want)])
    results = []
    for module in (kernel, reference):
        merged_out, merged_lse = out.clone(), lse.clone()
        module.merge_(merged_out, merged_lse, step_out, step, seq_dim)
        results.append((merged_out, merged_lse))
    compare(f"merge_ {name}", list(zip(*results, strict=True)))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps({"math": mathematics(), "merge": merges()}))
