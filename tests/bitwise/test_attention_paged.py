"""Decode over pages has prefill's bits, whatever the page size, the pages' places and the other sequences."""

import math

import pytest
import torch

from attention_cases import everything, operands
from bits import assert_equal_bits
from te_overrides.kernels.attention.paged import paged_attention
from te_overrides.kernels.attention.reference import AttentionError

LENGTHS = [1, 64, 65, 130, 0, 17]
HEADS, GROUPS, D = 4, 2, 8


def cache(page_size, dtype=torch.bfloat16, seed=0):
    """A cache of shuffled pages holding LENGTHS sequences, NaN wherever nothing was written."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in LENGTHS]
    places = torch.randperm(sum(pages) + 3, generator=generator)
    table = torch.full((len(LENGTHS), max(pages)), -1, dtype=torch.int32)
    keys = torch.full((len(places), page_size, GROUPS, D), float("nan"), dtype=dtype)
    values = keys.clone()
    dense = []
    for index, length in enumerate(LENGTHS):
        q, k, v, _ = operands(max(length, 1), 1, HEADS, GROUPS, D, dtype, seed=index)
        dense.append((q[:length], k[:length], v[:length]))
        for page in range(pages[index]):
            place = places[sum(pages[:index]) + page]
            table[index, page] = place
            for into, x in ((keys, k), (values, v)):
                part = x[page * page_size : min((page + 1) * page_size, length), 0]
                into[place, : part.shape[0]] = part
    return keys, values, table, dense


@pytest.mark.parametrize("page_size", [1, 16, 24, 256])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("window", [None, (20, 0)])
def test_decode_over_pages_has_the_bits_of_prefill(page_size, s_q, window):
    keys, values, table, dense = cache(page_size)
    query = torch.zeros(len(LENGTHS), s_q, HEADS, D, dtype=torch.bfloat16)
    for index, (q, _, _) in enumerate(dense):
        last = q[-s_q:, 0] if q.shape[0] else q[:, 0]
        query[index, s_q - last.shape[0] :] = last
    out, lse = paged_attention(
        query, keys, values, block_table=table, seq_lens=torch.tensor(LENGTHS), window=window
    )
    for index, (q, k, v) in enumerate(dense):
        rows = min(s_q, q.shape[0])
        want = everything(q, k, v, torch.zeros_like(q), window=window)
        what = f"sequence of {LENGTHS[index]}, pages of {page_size}"
        assert_equal_bits(out[index, s_q - rows :], want["out"][q.shape[0] - rows :, 0], f"out, {what}")
        assert_equal_bits(lse[index, :, s_q - rows :], want["lse"][0, :, q.shape[0] - rows :], f"lse, {what}")
        assert not bool(out[index, : s_q - rows].any())
        assert bool((lse[index, :, : s_q - rows] == -math.inf).all())


def test_tables_that_do_not_hold_their_sequence_are_refused_by_name():
    keys, values, table, _ = cache(16)
    query = torch.zeros(len(LENGTHS), 1, HEADS, D, dtype=torch.bfloat16)
    lengths = torch.tensor(LENGTHS)
    good = {"block_table": table, "seq_lens": lengths}
    for change, message in [
        ({"block_table": table[:, :2]}, "sequence 1 has 64 keys, its block_table row has room for 32"),
        (
            {"block_table": torch.where(table == table[1, 0], 99, table)},
            r"sequence 1: .* 99; the cache has pages 0 … ",
        ),
        ({"seq_lens": lengths + 16 * (lengths == 17)}, r"sequence 5: block_table names pages -1"),
        ({"seq_lens": lengths[:2]}, r"seq_lens \(2,\) do not describe the 6 sequences"),
        ({"window": (3, 3)}, "into the future"),
    ]:
        with pytest.raises(AttentionError, match=message):
            paged_attention(query, keys, values, **{**good, **change})
    with pytest.raises(AttentionError, match="value_cache .* differ"):
        paged_attention(query, keys, values[:, :8], **good)
