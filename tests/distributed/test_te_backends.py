"""Upstream's own attention modules into the replaced runtime: what they pass is covered, what they get fits.

`FlashAttention.forward` and `FusedAttention.forward` rearrange their operands, choose keywords that grow with every
release, call the entry point by the name they imported, and reshape what it returns. All of that runs here unmodified.
`DotProductAttention` calls none of them at one rank as long as our override stands in its forward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bits import assert_equal_bits
from procs import run_ranks
from te_cpu import backends_forward, ring, single_rank
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from upstream_wheels import TRANSFORMER_ENGINE, sources

CASES = [(b, f) for b in backends_forward.BACKENDS for f in backends_forward.FORMATS]


def _every_case(rank: int, world_size: int) -> dict[Any, Any]:
    from te_cpu.armed import backends, context_parallel, te_on_cpu

    te_on_cpu.prepare_ring(context_parallel)
    report: dict[Any, Any] = {case: backends_forward.run(backends, *case, dist.group.WORLD) for case in CASES}
    report["one rank"] = {qkv_format: single_rank.run(qkv_format) for qkv_format in backends_forward.FORMATS}
    report["refused"] = single_rank.refusals()
    return report


def _on_one_rank(backend: str, qkv_format: str) -> dict[str, Tensor]:
    """out, dQ, dK, dV of the whole batch, [t, …] packed or [b, s, …]."""
    whole = ring.packed_operands() if qkv_format == "thd" else [x.transpose(0, 1) for x in ring.operands()]
    q, k, v, grad = (x.to(torch.bfloat16) for x in whole)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    if qkv_format == "thd":
        cu_seqlens, padded = backends_forward.boundaries(backend)
        out, _ = packed_attention(
            q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_padded=padded, softmax_scale=ring.D**-0.5
        )
    else:
        out, _ = context_parallel_attention(q, k, v, softmax_scale=ring.D**-0.5)
    out.backward(grad)
    results = {"out": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}
    return results if qkv_format == "thd" else {name: x.transpose(0, 1) for name, x in results.items()}


@pytest.mark.parametrize("version", TRANSFORMER_ENGINE)
def test_upstreams_modules_at_two_ranks_give_the_bits_of_one(version: str) -> None:
    """Nothing that a module passes is refused, and its output and gradients are those of attention on one rank."""
    environment = {"DETERMINISTIC_ROCM": "invariant", "TE_SOURCES": str(sources(version))}
    reports = run_ranks(2, _every_case, env=environment, imports=("te_cpu.armed",))
    for backend, qkv_format in CASES:
        want = _on_one_rank(backend, qkv_format)
        for rank, report in enumerate(reports):
            results = report[backend, qkv_format]
            rows = results.pop("rows")
            for name, got in results.items():
                got = got.transpose(0, 1) if qkv_format == "sbhd" else got
                mine = want[name][rows] if qkv_format == "thd" else want[name][:, rows]
                assert_equal_bits(got, mine, f"TE {version}, {backend}, {qkv_format}, rank {rank}: {name}")
    for qkv_format in backends_forward.FORMATS:
        want = _on_one_rank("FusedAttention", qkv_format)
        for name, got in reports[0]["one rank"][qkv_format].items():
            got = got.transpose(0, 1) if qkv_format == "sbhd" else got
            what = f"TE {version}, DotProductAttention at CP=1, {qkv_format}: {name}"
            assert_equal_bits(got, want[name], what)
    for (_, _, named), said in zip(single_rank.REFUSED, reports[0]["refused"], strict=True):
        assert named in said, said
