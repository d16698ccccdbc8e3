"""Upstream's context-parallel attention inside a GPT: TransformerEngine's real ring over gloo.

The core attention of Megatron's local spec refuses context parallelism, so the ring is put in its place: the same
FlashAttention stand-in without context parallelism, TransformerEngine's ``attn_forward_func_with_cp`` with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_plugins.verify.model import te_on_cpu

_MODULE: Any = None


def load_ring(sources: Path) -> None:
    """Load TransformerEngine's sources once, before ranks are forked. The correction functions run eagerly."""
    global _MODULE
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    _MODULE = te_on_cpu.load(sources)
    te_on_cpu.prepare_ring(_MODULE)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out: torch.Tensor
        out, lse, _, _ = te_on_cpu.flash_forward(q, k, v, softmax_scale=scale, causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        te_on_cpu.flash_backward(
            grads[0], q, k, v, out, lse, dq, dk, dv, softmax_scale=ctx.scale, causal=True
        )
        return dq, dk, dv, None


class RingCoreAttention(torch.nn.Module):
    """FlashAttention stand-in at CP=1, TransformerEngine's p2p ring above."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """[s, b, heads, d] local shards -> [s, b, heads * d]."""
        q, k, v = (x.transpose(0, 1).contiguous() for x in (query, key, value))
        group = parallel_state.get_context_parallel_group()
        cp = dist.get_world_size(group)
        if cp == 1:
            out = _Flash.apply(q, k, v, self.scale)
        else:
            batch, whole = q.shape[0], q.shape[1] * cp
            cu_seqlens = torch.arange(0, (batch + 1) * whole, whole, dtype=torch.int32)
            out = _MODULE.attn_forward_func_with_cp(
                True, q, k, v, cu_seqlens, cu_seqlens, whole, whole, None, None, 0.0, group,
                dist.get_process_group_ranks(group), te_on_cpu.FakeStream(), "p2p", softmax_scale=self.scale,
                qkv_format="bshd", attn_mask_type="causal", deterministic=True, use_fused_attention=False,
                window_size=(-1, 0),
            )  # fmt: skip
        by_head: torch.Tensor = out.reshape(q.shape[0], q.shape[1], -1)
        return by_head.transpose(0, 1).contiguous()


def ring_spec() -> Any:
    """Megatron's local spec with the ring as core attention."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = RingCoreAttention
    return spec
