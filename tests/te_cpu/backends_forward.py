"""Runs TransformerEngine's own `FlashAttention` and `FusedAttention` on gloo ranks, through their CP entry point."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_cpu import ring

BACKENDS = ("FlashAttention", "FusedAttention")
FORMATS = ("sbhd", "bshd", "thd")
# FlashAttention takes no padding between sequences before 2.16.
UNPADDED = torch.tensor([0, 16, 16, 48], dtype=torch.int32)


class OnGpu(Tensor):
    """A CPU tensor that passes upstream's check for CUDA tensors; its bits are untouched."""

    is_cuda = True


def boundaries(backend: str) -> tuple[Tensor, Tensor]:
    """cu_seqlens and cu_seqlens_padded of the packed batch that `backend` is given."""
    return (UNPADDED, UNPADDED) if backend == "FlashAttention" else (ring.CU_SEQLENS, ring.CU_SEQLENS_PADDED)


def _packed_rows(cu_seqlens_padded: Tensor, group: dist.ProcessGroup) -> Tensor:
    starts, stops = cu_seqlens_padded[:-1].tolist(), cu_seqlens_padded[1:].tolist()
    held = [start + ring.positions(stop - start, group) for start, stop in zip(starts, stops, strict=True)]
    return torch.cat(held)


def run(backends: Any, backend: str, qkv_format: str, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """out, dQ, dK, dV of this rank's rows in the format's own order, and `rows`: which rows of the batch they are."""
    from packaging.version import Version

    from megatron_plugins.verify.model import te_on_cpu

    cu_seqlens, cu_seqlens_padded = boundaries(backend)
    if qkv_format == "thd":
        whole, rows, length = ring.packed_operands(), _packed_rows(cu_seqlens_padded, group), 48
    else:
        whole, rows, length = ring.operands(), ring.positions(ring.LENGTH, group), ring.LENGTH
        cu_seqlens = cu_seqlens_padded = torch.arange(0, (ring.BATCH + 1) * length, length, dtype=torch.int32)
    # bfloat16: upstream's modules refuse float32.
    held = [x.to(torch.bfloat16)[rows if qkv_format == "thd" else (slice(None), rows)] for x in whole]
    if qkv_format == "sbhd":
        held = [x.transpose(0, 1) for x in held]
    q, k, v = (x.contiguous().as_subclass(OnGpu).requires_grad_() for x in held[:3])
    arguments: dict[str, Any] = {
        "qkv_layout": "_".join([qkv_format] * 3), "window_size": (-1, 0), "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens, "cp_group": group, "cp_global_ranks": dist.get_process_group_ranks(group),
        "cp_stream": te_on_cpu.FakeStream(), "cp_comm_type": "p2p", "max_seqlen_q": length, "max_seqlen_kv": length,
        "attn_mask_type": "padding_causal" if qkv_format == "thd" else "causal",
    }  # fmt: skip
    if backend == "FlashAttention":
        arguments["flash_attention_backend"] = Version("2.7.4")
    else:
        arguments["fused_attention_backend"] = backends.FusedAttnBackend["F16_arbitrary_seqlen"]
        arguments["cu_seqlens_q_padded"] = arguments["cu_seqlens_kv_padded"] = cu_seqlens_padded
        arguments["pad_between_seqs"] = qkv_format == "thd"
    module = getattr(backends, backend)(ring.D**-0.5, attention_dropout=0.0, deterministic=True)
    out = module(q, k, v, **arguments)
    # Heads arrive folded into one dimension, as the projection behind attention takes them.
    assert out.shape == (*q.shape[:-2], q.shape[-2] * q.shape[-1]), (out.shape, q.shape)
    out.backward(held[3].reshape(out.shape))
    results = {"out": out.detach().view(q.shape), "dQ": q.grad, "dK": k.grad, "dV": v.grad}
    plain = {name: x.as_subclass(Tensor) for name, x in results.items()}
    return {**plain, "rows": rows}
