"""Upstream's ring of packed sequences (thd) on gloo ranks: forward, the pass that merges.

Two more stand-ins than the dense ring needs, and both only move or repeat what `te_on_cpu` has: FlashAttention's kernel
for packed sequences is its dense one, sequence by sequence, and `tex.thd_read_half_tensor` reads rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_cpu import ring

CORRECTIONS = ("te.thd_second_half_lse_correction", "te.thd_out_correction")


def read_half(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """First or second half of every sequence: [t, h, d] or [2, t, h, d] (keys and values) -> t/2 rows."""
    bounds, halves = cu_seqlens.tolist(), []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        middle = (start + stop) // 2
        halves.append(slice(start, middle) if half == 0 else slice(middle, stop))
    dimension = tensor.dim() - 3
    parts = [tensor.narrow(dimension, s.start, s.stop - s.start) for s in halves]
    return torch.cat(parts, dimension)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, max_q: int, max_kv: int, *rest: Any, **options: Any
) -> tuple[Any, ...]:  # fmt: skip
    """FlashAttention 2.7's ``_flash_attn_varlen_forward`` on [t, h, d]: (out, lse [h, t] float32, None, rng state)."""
    from megatron_plugins.verify.model.te_on_cpu import flash_forward

    outs, lses = [], []
    queries, keys = (list(zip(c[:-1].tolist(), c[1:].tolist(), strict=True)) for c in (cu_q, cu_kv))
    for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
        out, lse, *_ = flash_forward(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], *rest, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1), None, torch.zeros(2, dtype=torch.int64)


def prepare(context_parallel: Any, backends: Any) -> None:
    """Let the loaded module run its packed ring, after `te_on_cpu.prepare_ring`."""
    backends._flash_attn_varlen_fwd = varlen_forward
    context_parallel.tex.thd_read_half_tensor = read_half


def run(entry: Any, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Outputs of this rank for `ring.operands()`, [b, s_local, h, d]: as one packed batch, and as a dense one."""
    from megatron_plugins.verify.model import te_on_cpu

    mine = ring.positions(ring.LENGTH, group)
    held = [x[:, mine].contiguous() for x in ring.operands()[:3]]
    bounds = torch.arange(0, (ring.BATCH + 1) * ring.LENGTH, ring.LENGTH, dtype=torch.int32)
    outs = []
    for qkv_format, mask in (("thd", "padding_causal"), ("bshd", "causal")):
        q, k, v = (x.flatten(0, 1) if qkv_format == "thd" else x for x in held)
        padded = bounds if qkv_format == "thd" else None
        with torch.no_grad():
            out = entry(
                True, q, k, v, bounds, bounds, ring.LENGTH, ring.LENGTH, padded, padded, 0.0, group,
                dist.get_process_group_ranks(group), te_on_cpu.FakeStream(), "p2p", softmax_scale=ring.D**-0.5,
                qkv_format=qkv_format, attn_mask_type=mask, deterministic=True, use_fused_attention=False,
                window_size=(-1, 0),
            )  # fmt: skip
        outs.append(out.reshape(held[0].shape))
    return outs[0], outs[1]
