"""A packed sequence has the bits it has alone, wherever it lies and whatever its padding holds."""

import math

import pytest
import torch

from attention_cases import RESULTS, everything, operands, packed_everything, rows_of
from bits import assert_equal_bits
from te_overrides.kernels.attention.context_parallel import packed_attention
from te_overrides.kernels.attention.reference import AttentionError
from te_overrides.kernels.zigzag.reference import LayoutError

LENGTHS = [5, 11, 0, 3, 70, 128]
PADDED = [16, 16, 0, 16, 80, 128]


def boundaries(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def batch(padded=PADDED, dtype=torch.bfloat16):
    return [x.squeeze(1) for x in operands(sum(padded), 1, 4, 2, 8, dtype)]


def sequences(lengths, padded):
    starts = boundaries(padded).tolist()
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (4, 0)}])
def test_a_packed_sequence_has_the_bits_it_has_alone(options):
    tensors = batch()
    got = packed_everything(
        *tensors, cu_seqlens=boundaries(LENGTHS), cu_seqlens_padded=boundaries(PADDED), **options
    )
    for rows in sequences(LENGTHS, PADDED):
        alone = everything(*(x[rows].unsqueeze(1) for x in tensors), **options)
        for name in RESULTS:
            part = got[name][..., rows] if name == "lse" else got[name][rows]
            assert_equal_bits(part, alone[name].squeeze(0 if name == "lse" else 1), f"{name}, rows {rows}")


def test_nan_in_padding_reaches_nobody_and_padding_has_zero_results():
    tensors = batch()
    options = {"cu_seqlens": boundaries(LENGTHS), "cu_seqlens_padded": boundaries(PADDED)}
    want = packed_everything(*tensors, **options)
    padding = torch.ones(sum(PADDED), dtype=torch.bool)
    for rows in sequences(LENGTHS, PADDED):
        padding[rows] = False
    spoiled = [torch.where(padding[:, None, None], float("nan"), x) for x in tensors]
    got = packed_everything(*spoiled, **options)
    for name in RESULTS:
        assert_equal_bits(got[name], want[name], name)
        rest = rows_of(got, padding.nonzero().flatten())[name]
        assert_equal_bits(
            rest, torch.full_like(rest, -math.inf if name == "lse" else 0.0), f"{name} of padding"
        )


def test_order_of_the_sequences_and_amount_of_padding_do_not_change_a_bit():
    tensors = batch(LENGTHS)
    want = packed_everything(*tensors, cu_seqlens=boundaries(LENGTHS))
    order = [4, 2, 0, 5, 3, 1]
    padded = [length + 3 * i for i, length in enumerate(LENGTHS[i] for i in order)]
    moved = [x.new_zeros(sum(padded), *x.shape[1:]) for x in tensors]
    old, new = sequences(LENGTHS, LENGTHS), sequences([LENGTHS[i] for i in order], padded)
    for source, target in zip((old[i] for i in order), new, strict=True):
        for to, x in zip(moved, tensors, strict=True):
            to[target] = x[source]
    got = packed_everything(
        *moved, cu_seqlens=boundaries([LENGTHS[i] for i in order]), cu_seqlens_padded=boundaries(padded)
    )
    for source, target in zip((old[i] for i in order), new, strict=True):
        for name in RESULTS:
            pair = [
                x[name][..., r] if name == "lse" else x[name][r] for x, r in ((got, target), (want, source))
            ]
            assert_equal_bits(*pair, f"{name}, rows {source}")


def test_boundaries_that_do_not_describe_the_rows_are_refused_by_name():
    q, k, v, _ = batch()
    for cu, padded, message in [
        ([0, 5, 16], None, r"boundaries end at 16, but 1 ranks hold 256 rows each.*not divided"),
        ([1, 256], None, "start at 0"),
        ([0, 20, 10, 256], None, "never descend"),
        ([], None, "n \\+ 1 numbers"),
        ([0, 5, 16], [0, 256], "names 2 sequences, cu_seqlens_padded 1"),
        ([0, 20, 21], [0, 16, 256], "sequence 0 .* has 20 tokens in 16 padded rows"),
    ]:
        with pytest.raises((AttentionError, LayoutError), match=message):
            packed_attention(q, k, v, cu_seqlens=cu, cu_seqlens_padded=padded)
    with pytest.raises(AttentionError, match=r"takes \[t, h, d\]"):
        packed_attention(q[None], k[None], v[None], cu_seqlens=[0, 256])
    with pytest.raises(AttentionError, match="256 query rows and 255 key rows"):
        packed_attention(q, k[1:], v[1:], cu_seqlens=[0, 256])


def test_an_empty_pack_is_served():
    q, k, v, _ = (x[:0] for x in batch())
    out, lse = packed_attention(q, k, v, cu_seqlens=[0, 0, 0])
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
