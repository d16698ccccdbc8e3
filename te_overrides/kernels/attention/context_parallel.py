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

Every exchange is under way before the pass in front of it computes (`gathering.py`): in backward K and V while the
statistics of rows are made, Q, dO and statistics while dQ is computed; with several shares of the key heads, the next
share while one is computed. Shares also bound what is held at a time: the memory-lean schedule is the same code with
more of them.

Whether all ranks mean the same attention (shapes, layout, mask, boundaries of packed sequences, shares) is asked once
for every new one; a rank that holds its rows in another layout is an error and no answer.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_overrides.kernels.attention.core_in_use import OURS, claim
from te_overrides.kernels.attention.gathering import (
    Moving,
    Traffic,
    bound_from_environment,
    one_ahead,
    shares_of,
)
from te_overrides.kernels.attention.ops import (
    attention_dkv,
    attention_dq,
    attention_forward,
    attention_statistics,
)
from te_overrides.kernels.attention.ranks import Ranks, cp_rank_of, cp_size_of, levels_of
from te_overrides.kernels.attention.reference import AttentionError, Mask, check_operands
from te_overrides.kernels.attention.runs import Run, runs_of_rank
from te_overrides.kernels.collectives.agreement import require_agreement
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.zigzag.reference import check_packed_rows, to_canonical


@eager_only
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_group: Ranks = None,
    layout: str = "zigzag",
    causal: bool = True,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
    gather_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sequences whose rows a context-parallel group shares.

    Args:
        query: [s_local, b, h, d], this rank's rows in the order of `layout`; bfloat16, float16 or float32.
        key, value: [s_local, b, h_kv, d]; h_kv divides h. The head dimension of `value` may differ.
        cp_group: the context-parallel group, or two levels of groups (`ranks.py`); None is one rank. Every rank must
            hold equally many rows.
        layout: "zigzag" or "contiguous" (te_overrides/kernels/zigzag/reference.py).
        causal: a query sees no later key.
        softmax_scale: default 1 / sqrt(d).
        window: (left, right) keys a query sees around its own position, -1 for unlimited.
        gather_bytes: what gathered operands may take on this rank (`gathering.py`); None reads
            DETERMINISTIC_ROCM_ATTENTION_GATHER_MIB, 4 GiB without it. Free of bits.

    Returns:
        out: like `query` with the head dimension of `value`; gradients reach query, key and value through it.
        softmax_lse: [b, h, s_local] float32, not differentiable.

    Raises:
        AttentionError: operands or a mask that the contract does not cover.
        LayoutError: an unknown layout, or rows that it cannot have given to this rank.
        DisagreementError: ranks that mean different attention, naming what each means.
    """
    _check_own_rows(query, key, value)
    claim(OURS)
    ranks, rows = cp_size_of(cp_group), query.shape[0]
    runs = runs_of_rank(rows * ranks, rows * ranks, ranks, cp_rank_of(cp_group), layout, 0, 0)
    whole = _Sequence(held=slice(0, rows), length=rows * ranks, runs=runs)
    plan = _Plan.of(cp_group, layout, [whole], Mask.of(causal, window), softmax_scale, gather_bytes)
    plan.require_agreement(query, key, value)
    return _OwnedAttention.apply(query, key, value, plan)


@eager_only
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    cu_seqlens_padded: Sequence[int] | Tensor | None = None,
    cp_group: Ranks = None,
    layout: str = "zigzag",
    causal: bool = True,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
    gather_bytes: int | None = None,
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
        LayoutError: a sequence that the layout cannot cut evenly, named with the length to pad it to; other rows than
            the boundaries tell.
    """
    if not query.dim() == key.dim() == value.dim() == 3:
        raise AttentionError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: packed attention takes "
            "[t, h, d] operands; context_parallel_attention takes [s, b, h, d]"
        )
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    _check_own_rows(query, key, value)
    claim(OURS)
    sequences = _packed_sequences(
        _boundaries(cu_seqlens, "cu_seqlens"),
        None if cu_seqlens_padded is None else _boundaries(cu_seqlens_padded, "cu_seqlens_padded"),
        query.shape[0],
        cp_size_of(cp_group),
        cp_rank_of(cp_group),
        layout,
    )
    plan = _Plan.of(cp_group, layout, sequences, Mask.of(causal, window), softmax_scale, gather_bytes)
    plan.require_agreement(query, key, value)
    out, softmax_lse = _OwnedAttention.apply(query, key, value, plan)
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
    if len(sequences) == 1 and sequences[0].length == parts[0].shape[dim] * len(parts):
        return to_canonical(parts, layout, dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(sequence.length for sequence in sequences)
    whole, start = parts[0].new_empty(shape), 0
    for sequence in sequences:
        held = sequence.held
        own = [part.narrow(dim, held.start, held.stop - held.start) for part in parts]
        rows = to_canonical(own, layout, dim).narrow(dim, 0, sequence.length)
        whole.narrow(dim, start, sequence.length).copy_(rows)
        start += sequence.length
    return whole


@dataclass(frozen=True)
class _Plan:
    """What one call of attention is about, on every rank alike.

    Attributes:
        gather_bytes: bound on what gathered operands take.
    """

    cp_group: Ranks
    layout: str
    sequences: Sequence[_Sequence]
    mask: Mask
    softmax_scale: float | None
    gather_bytes: int

    @classmethod
    def of(
        cls,
        cp_group: Ranks,
        layout: str,
        sequences: Sequence[_Sequence],
        mask: Mask,
        softmax_scale: float | None,
        gather_bytes: int | None,
    ) -> _Plan:
        bound = bound_from_environment() if gather_bytes is None else gather_bytes
        return cls(cp_group, layout, sequences, mask, softmax_scale, bound)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(itertools.chain.from_iterable(sequence.runs for sequence in self.sequences))

    @property
    def options(self) -> dict[str, Any]:
        return {"mask": self.mask, "softmax_scale": self.softmax_scale}

    def require_agreement(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise DisagreementError where the ranks of a group mean different attention."""
        levels = levels_of(self.cp_group)
        if not levels:
            return
        held = [(s.held.start, s.held.stop, s.length) for s in self.sequences]
        packing = hashlib.blake2b(repr(held).encode(), digest_size=8).hexdigest()
        shapes = " ".join(
            f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (query, key, value), strict=True)
        )
        line = (
            f"attention: {query.dtype} {shapes}, {self.layout}, {len(held)} sequences [{packing}], {self.mask}, "
            f"softmax_scale {self.softmax_scale}, gather_bytes {self.gather_bytes}"
        )
        for group in levels:
            require_agreement(line, group, query.device)

    def shares(self, query: Tensor, key: Tensor, value: Tensor, backward: bool) -> list[slice]:
        """Key heads that come together, share by share."""
        ranks, groups = cp_size_of(self.cp_group), key.shape[2]
        if ranks == 1:
            return [slice(0, groups)]
        rows = query.shape[0] * query.shape[1] * ranks
        size, per_group = query.element_size(), query.shape[2] // groups
        row = (query.shape[-1] + value.shape[-1]) * size
        keys, queries = rows * row, rows * per_group * (row + 2 * 4)
        traffic = Traffic((keys, queries) if backward else (keys,), ranks)
        # On a CPU there is nothing to hide behind.
        count = traffic.shares(groups, self.gather_bytes, overlap=query.device.type != "cpu")
        return shares_of(groups, count)

    def start(self, *operands: Tensor) -> Moving:
        return Moving(operands, self.cp_group)

    def canonical(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        return _canonical(self.sequences, parts, self.layout, dim)


def _heads(groups: slice, per_group: int) -> slice:
    """Query heads of some key heads."""
    return slice(groups.start * per_group, groups.stop * per_group)


class _Whole:
    """A result whose heads come share by share; where one share brings all, its tensor as it is."""

    def __init__(self, heads: int, dim: int) -> None:
        self._heads, self._dim = heads, dim
        self.tensor: Tensor | None = None

    def put(self, at: slice, part: Tensor) -> None:
        if part.shape[self._dim] == self._heads:
            self.tensor = part
            return
        if self.tensor is None:
            shape = list(part.shape)
            shape[self._dim] = self._heads
            self.tensor = part.new_empty(shape)
        self.tensor.narrow(self._dim, at.start, at.stop - at.start).copy_(part)


class _OwnedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan
    ) -> tuple[Tensor | None, Tensor | None]:
        (_, _, heads, _), groups = query.shape, key.shape[2]
        out, softmax_lse = _Whole(heads, 2), _Whole(heads, 1)
        shares = plan.shares(query, key, value, backward=False)
        gathers = one_ahead(functools.partial(_start_keys, plan, key, value, share) for share in shares)
        for share, moving in zip(shares, gathers, strict=True):
            at = _heads(share, heads // groups)
            keys, values = (plan.canonical(parts) for parts in moving.take())
            rows, row_lse = attention_forward(query[:, :, at], keys, values, plan.runs, **plan.options)
            # Let go of this share before the one behind it is put in order.
            del keys, values
            out.put(at, rows)
            softmax_lse.put(at, row_lse)
        ctx.save_for_backward(query, key, value, out.tensor, softmax_lse.tensor)
        ctx.plan = plan
        ctx.mark_non_differentiable(softmax_lse.tensor)
        return out.tensor, softmax_lse.tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, softmax_lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        (_, _, heads, _), groups = query.shape, key.shape[2]
        # Every rank takes the same branches: what needs a gradient is a property of the model, not of the rank.
        of_queries, of_keys = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        shares = plan.shares(query, key, value, backward=True)
        statistics = functools.cache(functools.partial(attention_statistics, grad_out, out, softmax_lse))
        starts: list[Callable[[], Moving]] = []
        for share in shares:
            at = _heads(share, heads // groups)
            if of_queries:
                starts.append(functools.partial(_start_keys, plan, key, value, share))
            if of_keys:
                starts.append(functools.partial(_start_queries, plan, query, grad_out, statistics, at))
        gathers = one_ahead(starts)
        dq, dk, dv = _Whole(heads, 2), _Whole(groups, 2), _Whole(groups, 2)
        for share in shares:
            at = _heads(share, heads // groups)
            if of_queries:
                keys, values = (plan.canonical(parts) for parts in next(gathers).take())
                shift, delta = (x[:, at] for x in statistics())
                dq.put(
                    at,
                    attention_dq(
                        query[:, :, at],
                        keys,
                        values,
                        grad_out[:, :, at],
                        shift,
                        delta,
                        plan.runs,
                        **plan.options,
                    ),
                )
                del keys, values
            if of_keys:
                shifts, deltas, queries, grads = next(gathers).take()
                rows_of_keys = attention_dkv(
                    plan.canonical(queries), key[:, :, share], value[:, :, share], plan.canonical(grads),
                    plan.canonical(shifts, 2), plan.canonical(deltas, 2), plan.runs, **plan.options,
                )  # fmt: skip
                del shifts, deltas, queries, grads
                for whole, rows in zip((dk, dv), rows_of_keys, strict=True):
                    whole.put(share, rows)
        return dq.tensor, dk.tensor, dv.tensor, None


def _start_keys(plan: _Plan, key: Tensor, value: Tensor, share: slice) -> Moving:
    return plan.start(key[:, :, share], value[:, :, share])


def _start_queries(
    plan: _Plan,
    query: Tensor,
    grad_out: Tensor,
    statistics: Callable[[], tuple[Tensor, Tensor]],
    at: slice,
) -> Moving:
    shift, delta = (x[:, at] for x in statistics())
    return plan.start(shift, delta, query[:, :, at], grad_out[:, :, at])


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
    check_packed_rows(padded, rows, cp_size, layout)
    sequences, origin = [], 0
    for index in range(len(padded) - 1):
        start, stop = padded[index : index + 2]
        length = cu_seqlens[index + 1] - cu_seqlens[index]
        if length > stop - start:
            raise AttentionError(
                f"sequence {index} of the packed batch has {length} tokens in {stop - start} padded rows; "
                "cu_seqlens_padded must leave room for every token"
            )
        held = slice(start // cp_size, stop // cp_size)
        runs = runs_of_rank(
            stop - start, length, cp_size, rank, layout, held.start, start if cp_size == 1 else origin
        )
        sequences.append(_Sequence(held=held, length=length, runs=runs))
        origin += length
    return sequences
