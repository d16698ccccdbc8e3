"""Do the plain-torch references compute the same bits on this GPU as on the CPU?

    python scripts/gpu/reference_bits.py [--json [FILE]]

Elementwise operations, chains, trees and rows are portable by construction; this runs each of them on both devices with
the same inputs and counts differing elements. Exit status 1 when one differs, 2 without a GPU. On ROCm the same command
applies (torch calls its devices "cuda" there too).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.attention import reference as attention
from te_overrides.kernels.attention.reference import Mask
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.cross_entropy.reference import vocab_parallel_log_prob
from te_overrides.kernels.embedding.reference import embedding_gradient
from te_overrides.kernels.gemm.reference import chain, lane_tree
from te_overrides.kernels.grad_norm.reference import square_bins
from te_overrides.kernels.granules.reference import granule_partials, sum_granules
from te_overrides.kernels.lse_merge.reference import merge_lse_
from te_overrides.kernels.portable_math import reference as math
from te_overrides.kernels.rmsnorm.reference import rmsnorm, rmsnorm_backward
from te_overrides.kernels.rope.reference import Rope
from te_overrides.kernels.swiglu.reference import swiglu, swiglu_backward

Case = Callable[[torch.device], list[torch.Tensor]]
FUNCTIONS = ("exp", "exp2", "log", "log1p", "sigmoid", "silu", "rsqrt", "cos", "sin")


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _every_exponent(count: int) -> torch.Tensor:
    """float32 numbers of random bits: all signs, exponents, subnormals, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(1))
    return bits.to(torch.int32).view(torch.float32)


def _attention(device: torch.device) -> list[torch.Tensor]:
    leaves = [_randn(192, 2, heads, 64, seed=heads, dtype=torch.bfloat16) for heads in (8, 4, 4)]
    q, k, v = (x.to(device) for x in leaves)
    rows, mask = torch.arange(192), Mask.of(True, None)
    out, lse = attention.attention_forward(q, k, v, rows, mask=mask)
    grad = _randn(*out.shape, seed=9, dtype=torch.bfloat16).to(device)
    statistics = (grad, lse, attention.attention_delta(grad, out))
    dq = attention.attention_dq(q, k, v, *statistics, rows, mask=mask)
    return [out, lse, dq, *attention.attention_dkv(q, k, v, *statistics, rows, mask=mask)]


def _norm(device: torch.device) -> list[torch.Tensor]:
    x, w, g = (
        _randn(*s, seed=i, dtype=torch.bfloat16).to(device)
        for i, s in enumerate([(256, 1000), (1000,), (256, 1000)])
    )
    y, rstd = rmsnorm(x, w, 1e-6)
    return [y, rstd, *rmsnorm_backward(g, x, w, rstd)]


def _log_prob(device: torch.device) -> list[torch.Tensor]:
    logits = (_randn(64, 8192, dtype=torch.bfloat16) * 4).to(device).requires_grad_()
    out = vocab_parallel_log_prob(logits, (torch.arange(64) * 127).to(device), valid=8100)
    out.sum().backward()
    return [out, logits.grad]


def _swiglu(device: torch.device) -> list[torch.Tensor]:
    gate, up, grad = (_randn(512, 256, seed=i, dtype=torch.bfloat16).to(device) for i in range(3))
    return [swiglu(gate, up), *swiglu_backward(grad, gate, up)]


def _rope(device: torch.device) -> list[torch.Tensor]:
    t = _randn(300, 2, 4, 64, dtype=torch.bfloat16).to(device).requires_grad_()
    angles = torch.arange(300).float()[:, None] * torch.rand(64, generator=torch.Generator().manual_seed(2))
    out = Rope.apply(t, angles[:, None, None].to(device), False, 1.0)
    out.backward(_randn(*out.shape, seed=3, dtype=torch.bfloat16).to(device))
    return [out, t.grad]


def _merge(device: torch.device) -> list[torch.Tensor]:
    lse, step = _every_exponent(1 << 18).to(device), _every_exponent(1 << 18).flip(0).to(device)
    merge_lse_(lse, step)
    return [lse]


def cases() -> dict[str, Case]:
    """Name -> what it computes on a device."""
    whole: dict[str, Case] = {}
    for name in FUNCTIONS:
        function = getattr(math, name)
        whole[f"{name}, {1 << 22} random bit patterns"] = lambda device, f=function: [
            f(_every_exponent(1 << 22).to(device))
        ]
    for dtype in (torch.bfloat16, torch.float32):
        a, b = _randn(96, 1024, dtype=dtype), _randn(160, 1024, seed=1, dtype=dtype)
        whole[f"chain, {dtype}"] = lambda device, a=a, b=b: [chain(a.to(device), b.to(device))]
        whole[f"eight-lane tree, {dtype}"] = lambda device, a=a, b=b: [
            lane_tree(a.to(device), b.to(device), tp_size=1, segments=[512, 512])
        ]
    terms, ids = _randn(250, 3, 65), torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(3))
    rows = _randn(400, 33, seed=4, dtype=torch.bfloat16)
    whole |= {
        "granules": lambda device: [sum_granules(granule_partials(terms.to(device)))],
        "embedding gradient": lambda device: [embedding_gradient(ids.to(device), rows.to(device), 50)],
        "gradient norm bins": lambda device: [square_bins([terms.to(device)])],
        "RMSNorm, forward and backward": _norm,
        "log-probability, forward and backward": _log_prob,
        "SwiGLU, forward and backward": _swiglu,
        "RoPE, forward and backward": _rope,
        "LSE merge, random bit patterns": _merge,
        "attention: out, LSE, dQ, dK, dV": _attention,
    }
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    with json_alone(args.json):
        rows = []
        for name, case in cases().items():
            start = time.monotonic()
            counts = [count_mismatches(g.detach().cpu(), w.detach()) for g, w in zip(
                case(torch.device("cuda")), case(torch.device("cpu")), strict=True
            )]  # fmt: skip
            rows.append(
                {"case": name, "mismatched": sum(c[0] for c in counts), "total": sum(c[1] for c in counts)}
            )
            row = rows[-1]
            print(
                f"{row['mismatched']:>10,} of {row['total']:>10,} differ  {name}  ({time.monotonic() - start:.1f} s)",
                flush=True,
            )
        device = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "hip": torch.version.hip,
        }
        print(device)
    write_json(args.json, {"environment": device, "rows": rows})
    raise SystemExit(any(row["mismatched"] for row in rows))


if __name__ == "__main__":
    main()
