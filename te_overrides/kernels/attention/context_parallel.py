"""Attention over a context-parallel group with the bits of one rank (docs/attention.md).

A ring adds partial outputs, and an all-gather runtime reduces partial dK, dV: in both the number of ranks is in the
bits (TransformerEngine's all_gather is exact in `out` and differs in a quarter of dK, dV). Here operands travel and
every row has one owner:

    forward    all-gather K, V;  out, LSE of my queries over all keys
    backward   all-gather K, V;  dQ of my queries over all keys
               all-gather Q, dO, LSE, delta;  dK, dV of my keys over all queries

Gathered tensors are put into the order of positions first, so the arithmetic sees neither ranks nor layout. K and V
are gathered again in backward rather than kept: what a rank saves for backward stays its own share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_overrides.kernels.attention.reference import (
    Mask,
    attention_delta,
    attention_dkv,
    attention_dq,
    attention_forward,
    check_operands,
)
from te_overrides.kernels.collectives.transport import all_gather, group_rank, group_size
from te_overrides.kernels.zigzag.reference import rank_positions, to_canonical


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    causal: bool = True,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sequences whose rows a context-parallel group shares.

    Args:
        query: [s_local, b, h, d], this rank's rows in the order of `layout`; bfloat16, float16 or float32.
        key, value: [s_local, b, h_kv, d]; h_kv divides h. The head dimension of `value` may differ.
        cp_group: the context-parallel group; None is one rank. Every rank must hold equally many rows.
        layout: "zigzag" or "contiguous" (te_overrides/kernels/zigzag/reference.py).
        causal: a query sees no later key.
        softmax_scale: default 1 / sqrt(d).
        window: (left, right) keys a query sees around its own position, -1 for unlimited.

    Returns:
        out: like `query` with the head dimension of `value`; gradients reach query, key and value through it.
        softmax_lse: [b, h, s_local] float32, not differentiable.

    Raises:
        AttentionError: operands or a mask that the contract does not cover.
        LayoutError: an unknown layout, or rows that it cannot have given to this rank.
    """
    check_operands(query, key, value)
    mask = Mask.of(causal, window)
    return _ContextParallelAttention.apply(query, key, value, cp_group, layout, mask, softmax_scale)


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cp_group: dist.ProcessGroup | None,
        layout: str,
        mask: Mask,
        softmax_scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        ranks = group_size(cp_group)
        positions = rank_positions(query.shape[0] * ranks, ranks, group_rank(cp_group), layout)
        all_keys, all_values = (to_canonical(all_gather(x, cp_group), layout) for x in (key, value))
        out, softmax_lse = attention_forward(
            query, all_keys, all_values, positions, mask=mask, softmax_scale=softmax_scale
        )
        ctx.save_for_backward(query, key, value, out, softmax_lse)
        ctx.cp_group, ctx.layout, ctx.positions = cp_group, layout, positions
        ctx.mask, ctx.softmax_scale = mask, softmax_scale
        ctx.mark_non_differentiable(softmax_lse)
        return out, softmax_lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, softmax_lse = ctx.saved_tensors
        options = {"mask": ctx.mask, "softmax_scale": ctx.softmax_scale}
        delta = attention_delta(grad_out, out)
        dq = dk = dv = None

        def gathered(x: Tensor, dim: int = 0) -> Tensor:
            return to_canonical(all_gather(x, ctx.cp_group), ctx.layout, dim)

        # Every rank takes the same branches: what needs a gradient is a property of the model, not of the rank.
        if ctx.needs_input_grad[0]:
            dq = attention_dq(
                query, gathered(key), gathered(value), grad_out, softmax_lse, delta, ctx.positions, **options
            )
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = attention_dkv(
                gathered(query),
                key,
                value,
                gathered(grad_out),
                gathered(softmax_lse, 2),
                gathered(delta, 2),
                ctx.positions,
                **options,
            )
        return dq, dk, dv, None, None, None, None
