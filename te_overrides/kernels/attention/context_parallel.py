"""Attention over a context-parallel group with the bits of one rank (docs/attention.md).

A ring adds partial outputs, and an all-gather runtime reduces partial dK, dV: in both the number of ranks is in the
bits (TransformerEngine's all_gather is exact in `out` and differs in a quarter of dK, dV). Here operands travel and
every row has one owner:

    forward    all-gather K, V;  out, LSE of my queries over all keys
    backward   all-gather K, V;  dQ of my queries over all keys
               all-gather Q, dO, LSE, delta;  dK, dV of my keys over all queries

Gathered rows are put into the order of positions first, sequence by sequence, so the arithmetic sees neither ranks nor
layout nor packing. K and V are gathered again in backward rather than kept: what a rank saves for backward stays its
own share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_overrides.kernels.attention.ops import (
    attention_dkv,
    attention_dq,
    attention_forward,
    attention_statistics,
)
from te_overrides.kernels.attention.reference import AttentionError, Mask, check_operands
from te_overrides.kernels.attention.runs import Run, runs_of_rank
from te_overrides.kernels.collectives.transport import all_gather, group_rank, group_size
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.zigzag.reference import check_length, to_canonical


@eager_only
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
    _check_own_rows(query, key, value)
    ranks, rows = group_size(cp_group), query.shape[0]
    runs = runs_of_rank(rows * ranks, rows * ranks, ranks, group_rank(cp_group), layout, 0, 0)
    whole = _Sequence(held=slice(0, rows), length=rows * ranks, runs=runs)
    mask = Mask.of(causal, window)
    return _OwnedAttention.apply(query, key, value, cp_group, layout, [whole], mask, softmax_scale)


@eager_only
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    cu_seqlens_padded: Sequence[int] | Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    causal: bool = True,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sequences packed on one token axis (TransformerEngine's thd), each within itself.

    Under context parallelism every padded sequence is laid out over the ranks by itself, as TransformerEngine does.
    The boundaries are those of the whole batch on every rank, never divided by the degree.

    Args:
        query: [t_local, h, d], this rank's rows; t_local times the degree is `cu_seqlens_padded[-1]`.
        key, value: [t_local, h_kv, d].
        cu_seqlens: n + 1 cumulative lengths of n sequences, from 0; zero-length sequences are allowed.
        cu_seqlens_padded: n + 1 cumulative lengths with each sequence's padding behind it; None is no padding.
        others: as for `context_parallel_attention`.

    Returns:
        out: [t_local, h, d_v]; padding rows are 0, and what padding holds (NaN included) reaches nobody.
        softmax_lse: [h, t_local] float32; -inf in padding rows.

    Raises:
        AttentionError: operands, boundaries or a mask that do not fit together.
        LayoutError: a sequence that the layout cannot cut evenly; names it and the length to pad it to.
    """
    if not query.dim() == key.dim() == value.dim() == 3:
        raise AttentionError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: packed attention takes "
            "[t, h, d] operands; context_parallel_attention takes [s, b, h, d]"
        )
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    _check_own_rows(query, key, value)
    sequences = _packed_sequences(
        _boundaries(cu_seqlens, "cu_seqlens"),
        None if cu_seqlens_padded is None else _boundaries(cu_seqlens_padded, "cu_seqlens_padded"),
        query.shape[0],
        group_size(cp_group),
        group_rank(cp_group),
        layout,
    )
    mask = Mask.of(causal, window)
    out, softmax_lse = _OwnedAttention.apply(
        query, key, value, cp_group, layout, sequences, mask, softmax_scale
    )
    return out.squeeze(1), softmax_lse.squeeze(0)


@dataclass(frozen=True)
class _Sequence:
    """Where one sequence lies among this rank's rows.

    Attributes:
        held: this rank's rows of the padded sequence; the same slice on every rank.
        length: positions of the whole sequence, padding left out.
        runs: which positions the rank's rows hold, padding left out; `origin` is a row of what `_canonical` returns.
    """

    held: slice
    length: int
    runs: tuple[Run, ...]


def _canonical(sequences: Sequence[_Sequence], parts: Sequence[Tensor], layout: str, dim: int = 0) -> Tensor:
    """What every rank holds in the order of positions, sequence behind sequence.

    One rank's rows are in that order: they stay where they are, padding included, which no run names.
    """
    if len(parts) == 1:
        return parts[0]
    whole = []
    for sequence in sequences:
        held = sequence.held
        own = [part.narrow(dim, held.start, held.stop - held.start) for part in parts]
        whole.append(to_canonical(own, layout, dim).narrow(dim, 0, sequence.length))
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim)


def _runs(sequences: Sequence[_Sequence]) -> tuple[Run, ...]:
    return tuple(itertools.chain.from_iterable(sequence.runs for sequence in sequences))


class _OwnedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cp_group: dist.ProcessGroup | None,
        layout: str,
        sequences: Sequence[_Sequence],
        mask: Mask,
        softmax_scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        keys, values = (_canonical(sequences, all_gather(x, cp_group), layout) for x in (key, value))
        runs = _runs(sequences)
        out, softmax_lse = attention_forward(
            query, keys, values, runs, mask=mask, softmax_scale=softmax_scale
        )
        ctx.save_for_backward(query, key, value, out, softmax_lse)
        ctx.cp_group, ctx.layout, ctx.sequences = cp_group, layout, sequences
        ctx.options = {"mask": mask, "softmax_scale": softmax_scale}
        ctx.mark_non_differentiable(softmax_lse)
        return out, softmax_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, softmax_lse = ctx.saved_tensors
        statistics = attention_statistics(grad_out, out, softmax_lse)
        # Every rank takes the same branches: what needs a gradient is a property of the model, not of the rank.
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = _dq(ctx, query, key, value, grad_out, *statistics)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = _dkv(ctx, query, key, value, grad_out, *statistics)
        return dq, dk, dv, None, None, None, None, None


def _dq(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, shift: Tensor, delta: Tensor
) -> Tensor:
    keys, values = (_canonical(ctx.sequences, all_gather(x, ctx.cp_group), ctx.layout) for x in (key, value))
    runs = _runs(ctx.sequences)
    return attention_dq(query, keys, values, grad_out, shift, delta, runs, **ctx.options)


def _dkv(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, shift: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    queries, grads = (
        _canonical(ctx.sequences, all_gather(x, ctx.cp_group), ctx.layout) for x in (query, grad_out)
    )
    all_shifts, all_deltas = (
        _canonical(ctx.sequences, all_gather(x, ctx.cp_group), ctx.layout, 2) for x in (shift, delta)
    )
    return attention_dkv(
        queries, key, value, grads, all_shifts, all_deltas, _runs(ctx.sequences), **ctx.options
    )


def _check_own_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_operands(query, key, value)
    if query.shape[0] != key.shape[0]:
        raise AttentionError(
            f"this rank holds {query.shape[0]} query rows and {key.shape[0]} key rows: context-parallel attention is "
            "self-attention, a rank holds the same positions of both"
        )


def _boundaries(cumulative: Sequence[int] | Tensor, name: str) -> list[int]:
    # One copy from the device, not one a number.
    bounds = [int(x) for x in (cumulative.tolist() if isinstance(cumulative, Tensor) else cumulative)]
    if not bounds or bounds[0] != 0 or any(b < a for a, b in itertools.pairwise(bounds)):
        raise AttentionError(f"{name} = {bounds}: it must hold n + 1 numbers, start at 0 and never descend")
    return bounds


def _packed_sequences(
    cu_seqlens: list[int],
    cu_seqlens_padded: list[int] | None,
    rows: int,
    cp_size: int,
    rank: int,
    layout: str,
) -> list[_Sequence]:
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if len(padded) != len(cu_seqlens):
        raise AttentionError(
            f"cu_seqlens names {len(cu_seqlens) - 1} sequences, cu_seqlens_padded {len(padded) - 1}; "
            "they must describe the same ones"
        )
    sequences, origin = [], 0
    for index in range(len(padded) - 1):
        start, stop = padded[index : index + 2]
        length = cu_seqlens[index + 1] - cu_seqlens[index]
        if length > stop - start:
            raise AttentionError(
                f"sequence {index} of the packed batch has {length} tokens in {stop - start} padded rows; "
                "cu_seqlens_padded must leave room for every token"
            )
        check_length(stop - start, cp_size, layout, f"sequence {index} of the packed batch, length")
        held = slice(start // cp_size, stop // cp_size)
        runs = runs_of_rank(
            stop - start, length, cp_size, rank, layout, held.start, start if cp_size == 1 else origin
        )
        sequences.append(_Sequence(held=held, length=length, runs=runs))
        origin += length
    if padded[-1] != rows * cp_size:
        raise AttentionError(
            f"the boundaries end at {padded[-1]}, but {cp_size} ranks hold {rows} rows each, {rows * cp_size} in all; "
            "boundaries are those of the whole batch (not divided by the context-parallel size), and rows behind the "
            "last sequence belong to its padding"
        )
    return sequences
