"""One definition of the context-parallel layouts, equal to Megatron's, there and back without loss."""

import pytest
import torch

from bits import assert_equal_bits
from te_overrides.kernels.zigzag.reference import (
    LAYOUTS,
    LayoutError,
    ZigzagError,
    from_canonical,
    packed_rank_rows,
    rank_positions,
    to_canonical,
)

DEGREES = [1, 2, 3, 4, 5, 8]


def test_arange_8_at_cp_2_as_reported_for_mixed_up_layouts():
    """verl#4250, verl#1332, ms-swift#10071, miles#885: zigzag read as contiguous."""
    assert rank_positions(8, 2, 0, "zigzag").tolist() == [0, 1, 6, 7]
    assert rank_positions(8, 2, 1, "zigzag").tolist() == [2, 3, 4, 5]
    assert rank_positions(8, 2, 1, "contiguous").tolist() == [4, 5, 6, 7]
    x = torch.arange(8)
    parts = [from_canonical(x, 2, rank, "zigzag") for rank in range(2)]
    assert to_canonical(parts, "zigzag").tolist() == list(range(8))
    # The mix-up itself is visible, not silently the identity.
    assert to_canonical(parts, "contiguous").tolist() != list(range(8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp_size", DEGREES)
def test_there_and_back_is_the_identity_in_every_form(layout, cp_size):
    x = torch.randn(3, 4 * 2 * cp_size, 5)
    parts = [from_canonical(x, cp_size, rank, layout, dim=1) for rank in range(cp_size)]
    assert_equal_bits(to_canonical(parts, layout, 1), x, "list")
    assert_equal_bits(to_canonical(torch.cat(parts, 1), layout, 1, cp_size=cp_size), x, "tensor")
    held = torch.cat([rank_positions(x.shape[1], cp_size, rank, layout) for rank in range(cp_size)])
    assert held.sort().values.tolist() == list(range(x.shape[1]))
    for part, rank in zip(parts, range(cp_size), strict=True):
        positions = rank_positions(x.shape[1], cp_size, rank, layout)
        assert bool((positions.diff() > 0).all())
        assert_equal_bits(part, x[:, positions], f"rank {rank}")


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zigzag_is_what_megatron_cuts(cp_size):
    """The formula of megatron.core.utils.get_batch_on_this_cp_rank: chunks `rank` and `2 * cp_size - rank - 1`."""
    seq_len = 12 * cp_size
    x = torch.arange(seq_len)
    for rank in range(cp_size):
        megatron = x.view(2 * cp_size, -1)[torch.tensor([rank, 2 * cp_size - rank - 1])].flatten()
        assert rank_positions(seq_len, cp_size, rank, "zigzag").tolist() == megatron.tolist()


def test_packed_sequences_are_cut_one_by_one():
    assert packed_rank_rows([0, 4, 4, 12], 2, 0, "zigzag").tolist() == [0, 3, 4, 5, 10, 11]
    assert packed_rank_rows([0, 4, 4, 12], 2, 1, "zigzag").tolist() == [1, 2, 6, 7, 8, 9]
    assert packed_rank_rows([0, 4, 4, 12], 2, 1, "contiguous").tolist() == [2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp_size", DEGREES)
def test_what_ranks_hold_of_a_pack_comes_back_in_its_order(layout, cp_size):
    bounds = tuple(2 * cp_size * n for n in (0, 3, 3, 4, 9))
    x = torch.randn(3, bounds[-1], 5)
    parts = [x[:, packed_rank_rows(bounds, cp_size, rank, layout)] for rank in range(cp_size)]
    assert_equal_bits(to_canonical(parts, layout, 1, cu_seqlens=bounds), x, "list")
    assert_equal_bits(
        to_canonical(torch.cat(parts, 1), layout, 1, cp_size=cp_size, cu_seqlens=bounds), x, "tensor"
    )
    if cp_size > 1:
        # The order of one sequence is another one: right shapes, wrong answers.
        assert not torch.equal(to_canonical(parts, layout, 1), x)


def test_boundaries_that_are_none_are_refused_by_name():
    x = [torch.zeros(6), torch.zeros(6)]
    for bounds, message in [
        ((0, 8, 4, 12), "sequence 1 of the packed batch starts at 8 and ends at 4; boundaries never descend"),
        ((4, 12), r"start at 0, found \[4, 12\]"),
        ((), "n \\+ 1 numbers"),
        ((0, 4, 8), "boundaries end at 8, but 2 ranks hold 6 rows each, 12 in all.*not divided"),
        ((0, 6, 12), "sequence 0 of the packed batch, length 6 cannot be laid out"),
    ]:
        with pytest.raises(LayoutError, match=message):
            to_canonical(x, "zigzag", cu_seqlens=bounds)
        if bounds != (0, 4, 8):
            with pytest.raises(LayoutError, match=message):
                packed_rank_rows(bounds, 2, 0, "zigzag")
    assert packed_rank_rows([0, 5, 16, 19], 1, 0, "zigzag").tolist() == list(range(19))


def test_lengths_that_cp_does_not_divide_are_refused_by_sequence_and_with_the_padded_length():
    """ISEEKYAN/Megatron-LM#111, NVIDIA/Megatron-LM#4495: cu_seqlens // cp_size on lengths 5, 11, 3."""
    with pytest.raises(
        ZigzagError, match=r"sequence 0 of the packed batch, length 5 .* multiple of 4; pad it to 8"
    ):
        packed_rank_rows([0, 5, 16, 19], 2, 0, "zigzag")
    with pytest.raises(
        LayoutError, match=r"sequence 1 of the packed batch, length 11 .*multiple of 2; pad it to 12"
    ):
        packed_rank_rows([0, 4, 15, 18], 2, 0, "contiguous")


def test_what_has_no_layout_is_refused_by_name():
    with pytest.raises(LayoutError, match="'ring' is not known; known layouts: 'zigzag', 'contiguous'"):
        rank_positions(8, 2, 0, "ring")
    with pytest.raises(ZigzagError, match="sequence length 10 .*zigzag over 3 .*multiple of 6; pad it to 12"):
        rank_positions(10, 3, 0, "zigzag")
    with pytest.raises(LayoutError, match="rank 2 is outside"):
        rank_positions(8, 2, 2, "zigzag")
    with pytest.raises(LayoutError, match="size is 0"):
        rank_positions(8, 0, 0, "zigzag")
    with pytest.raises(LayoutError, match="pass cp_size"):
        to_canonical(torch.arange(8), "zigzag")
    with pytest.raises(LayoutError, match="2 tensors for cp_size 4"):
        to_canonical([torch.arange(4)] * 2, "zigzag", cp_size=4)
    with pytest.raises(LayoutError, match="rank 1 holds 2 positions, rank 0 holds 4"):
        to_canonical([torch.arange(4), torch.arange(2)], "zigzag")
    with pytest.raises(LayoutError, match="no tensors"):
        to_canonical([], "zigzag")


def test_a_boundary_token_keeps_its_own_label_under_zigzag():
    """miles#885, ms-swift#10071: shifting labels after the cut labels a chunk's last token by the wrong neighbour."""
    tokens = torch.arange(100, 116)
    labels = torch.roll(tokens, -1)
    for cp_size in (2, 4):
        for rank in range(cp_size):
            mine = from_canonical(labels, cp_size, rank, "zigzag")
            positions = rank_positions(16, cp_size, rank, "zigzag")
            assert mine.tolist() == [100 + (int(p) + 1) % 16 for p in positions]
