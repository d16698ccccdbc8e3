"""Runs TransformerEngine's own `DotProductAttention` on one rank of a CPU."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from te_cpu import backends_forward, ring

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


def module(**options: Any) -> Any:
    """An attention module as a model builds it; its constructor asks for a GPU, its replaced forward does not."""
    cls = importlib.import_module(MODULE).DotProductAttention
    with mock.patch("torch.cuda.is_available", return_value=True):
        return cls(ring.HEADS, ring.D, num_gqa_groups=ring.GROUPS, attention_dropout=0.0, **options)


def run(qkv_format: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """out, dQ, dK, dV of the whole batch, in the format's own order."""
    packed = qkv_format == "thd"
    whole = [x.to(dtype) for x in (ring.packed_operands() if packed else ring.operands())]
    if qkv_format == "sbhd":
        whole = [x.transpose(0, 1) for x in whole]
    q, k, v = (x.contiguous().requires_grad_() for x in whole[:3])
    cu_seqlens, padded = backends_forward.boundaries("FusedAttention")
    arguments: dict[str, Any] = {"qkv_format": qkv_format}
    if packed:
        arguments |= {
            "attn_mask_type": "padding_causal", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens,
            "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded, "max_seqlen_q": 16, "max_seqlen_kv": 16,
        }  # fmt: skip
    out = module()(q, k, v, **arguments)
    assert out.shape == (*q.shape[:-2], q.shape[-2] * q.shape[-1]), (out.shape, q.shape)
    out.backward(whole[3].reshape(out.shape))
    return {"out": out.detach().view(q.shape), "dQ": q.grad, "dK": k.grad, "dV": v.grad}


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, {"core_attention_bias_type": "alibi"}, "attn_bias_type='alibi'"),
    ({}, {"alibi_slopes": torch.ones(ring.HEADS)}, "alibi_slopes"),
    ({}, {"inference_params": object()}, "inference_params"),
    ({}, {"attn_mask_type": "padding"}, "attn_mask_type='padding'"),
    ({"attention_type": "cross"}, {}, "attention_type='cross'"),
)
"""Options of the constructor, arguments of the call, and what the refusal names."""


def refusals() -> list[str]:
    """What each of REFUSED says."""
    from patches.errors import NotCoveredError

    said = []
    q, k, v, _ = ring.operands(dtype=torch.bfloat16)
    for options, arguments, _ in REFUSED:
        try:
            module(qkv_format="bshd", **options)(q, k, v, **arguments)
            said.append("nothing was refused")
        except NotCoveredError as error:
            said.append(str(error))
    return said
