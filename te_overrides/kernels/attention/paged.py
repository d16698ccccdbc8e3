"""Attention over a paged key/value cache with the bits of prefill.

Paged kernels split the keys of a long sequence over programs and merge; how far they split follows the batch and the
free multiprocessors, so that decode differs from prefill and from itself. Here the one attention of the contract walks
the keys in the order of positions, wherever their pages lie: on a GPU its kernel looks every key's page up, on a CPU
pages are brought together for the reference. A query's row is the same whether its keys were computed a moment ago or
lie in a cache, which is what lets rollout and training agree on a log-probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_overrides.kernels.attention import ops
from te_overrides.kernels.attention.core_in_use import OURS, claim
from te_overrides.kernels.attention.ops import kernel_for
from te_overrides.kernels.attention.reference import AttentionError, Mask, attention_forward
from te_overrides.kernels.attention.runs import Run
from te_overrides.kernels.eager import eager_only


@eager_only
@torch.no_grad()
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
    validate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last positions of each sequence over its cached keys, their own included.

    Args:
        query: [b, s_q, h, d]; row i of sequence n is at position `seq_lens[n] - s_q + i`. s_q = 1 is decode.
        key_cache, value_cache: [pages, page_size, h_kv, d]; any page size.
        block_table: integer [b, max_pages]; entry j is the page of positions j * page_size … Entries behind a
            sequence's last page may hold anything.
        seq_lens: integer [b], keys of each sequence in the cache; 0 for a slot without a sequence.
        softmax_scale: default 1 / sqrt(d).
        window: (left, 0) or (left, -1) for a sliding window.
        validate: look whether the table holds its sequences. On a GPU that waits for the device: verify a table once
            and pass False in the layers and steps after it.

    Returns:
        out: [b, s_q, h, d_v], 0 for rows before position 0.
        softmax_lse: [b, h, s_q] float32, -inf for them.

    Raises:
        AttentionError: a table that is too short for a sequence or names a page outside the cache; operands or a
            mask that the contract does not cover.
    """
    batch, s_q, heads, _ = query.shape
    page_size = key_cache.shape[1]
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise AttentionError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} differ"
        )
    if block_table.dim() != 2 or block_table.shape[0] != batch or seq_lens.shape != (batch,):
        raise AttentionError(
            f"block_table {tuple(block_table.shape)} and seq_lens {tuple(seq_lens.shape)} do not describe the "
            f"{batch} sequences of query {tuple(query.shape)}; give [b, max_pages] and [b]"
        )
    claim(OURS)
    mask = Mask.of(True, window)
    if validate:
        _require_table(block_table, seq_lens, page_size, key_cache.shape[0])
    kernel = kernel_for(query)
    if kernel is not None:
        return kernel.paged_forward(
            query, key_cache, value_cache, block_table, seq_lens, mask=mask, softmax_scale=softmax_scale
        )
    out = query.new_zeros(batch, s_q, heads, value_cache.shape[-1])
    softmax_lse = query.new_full((batch, heads, s_q), -torch.inf, dtype=torch.float32)
    for index, length in enumerate(seq_lens.tolist()):
        pages = block_table[index, : -(-length // page_size)].to(torch.int64)
        keys, values = (
            cache[pages].flatten(0, 1)[:length].unsqueeze(1) for cache in (key_cache, value_cache)
        )
        rows, row_lse = attention_forward(
            query[index].unsqueeze(1),
            keys,
            values,
            torch.arange(length - s_q, length),
            mask=mask,
            softmax_scale=softmax_scale,
        )
        out[index], softmax_lse[index] = rows.squeeze(1), row_lse.squeeze(0)
    return out, softmax_lse


@eager_only
@torch.no_grad()
def last_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Causal attention of the last positions of sequences over all their keys, contiguous in memory.

    Args:
        query: [s_q, b, h, d]; row i is at position `s_k - s_q + i`.
        key, value: [s_k, b, h_kv, d].

    Returns:
        [s_q, b, h, d_v].

    Raises:
        AttentionError: more queries than keys; operands or a mask that the contract does not cover.
    """
    s_q, s_k = query.shape[0], key.shape[0]
    if s_q > s_k:
        raise AttentionError(f"{s_q} queries at the end of {s_k} keys: a query's own key is among them")
    claim(OURS)
    runs = (Run(row=0, count=s_q, position=s_k - s_q, origin=0, length=s_k),)
    return ops.attention_forward(
        query, key, value, runs, mask=Mask.of(True, window), softmax_scale=softmax_scale
    )[0]


def _require_table(block_table: Tensor, seq_lens: Tensor, page_size: int, pages_in_cache: int) -> None:
    for index, length in enumerate(seq_lens.tolist()):
        pages = block_table[index, : -(-length // page_size)]
        if pages.numel() * page_size < length:
            raise AttentionError(
                f"sequence {index} has {length} keys, its block_table row has room for {pages.numel() * page_size}"
            )
        if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < pages_in_cache:
            raise AttentionError(
                f"sequence {index}: block_table names pages {int(pages.min())} … {int(pages.max())}; "
                f"the cache has pages 0 … {pages_in_cache - 1}"
            )
