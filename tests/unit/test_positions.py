"""A batch cut for another layout is an error and no answer: what position ids can tell."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_plugins import positions
from megatron_plugins.parallel_layout import ParallelLayout
from megatron_plugins.positions import (
    PositionMismatchError,
    check_positions,
    first_contradiction,
    require_packed_positions,
    require_positions,
)
from te_overrides.kernels.zigzag.reference import (
    from_canonical,
    packed_rank_rows,
    rank_positions,
    to_canonical,
)


class Layout(ParallelLayout):
    """A layout without process groups."""

    def __init__(self, cp_size: int, cp_rank: int) -> None:
        super().__init__(None, None, False)
        object.__setattr__(self, "_of", (cp_size, cp_rank))

    cp_size = property(lambda self: self._of[0])  # type: ignore[assignment]
    cp_rank = property(lambda self: self._of[1])  # type: ignore[assignment]


def _documents(length: int, starts: list[int]) -> torch.Tensor:
    """Ids that start again at `starts`."""
    ids = torch.arange(length)
    for start in starts:
        ids[start:] = torch.arange(length - start)
    return ids


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_and_contiguous_are_told_apart_on_every_rank_but_the_first_and_the_way_back_is_the_identity(
    size: int,
) -> None:
    """verl#4250, verl#1332, modelscope/ms-swift#10071: layouts mixed up; arange(8) at CP=2 is the smallest case."""
    length = 4 * size
    whole = torch.arange(length)
    for rank in range(size):
        layout = Layout(size, rank)
        require_positions(from_canonical(whole, size, rank, "zigzag").expand(3, -1), layout)
        contiguous = rank_positions(length, size, rank, "contiguous")
        if rank == 0:
            # As if a document started again in another rank's rows.
            require_positions(contiguous.unsqueeze(0), layout)
            continue
        with pytest.raises(
            PositionMismatchError, match=f"rank {rank} of {size} has position id .* zigzag layout"
        ):
            require_positions(contiguous.unsqueeze(0), layout)
    back = to_canonical([from_canonical(whole, size, rank, "zigzag") for rank in range(size)], "zigzag")
    assert torch.equal(back, whole)


def test_a_label_at_a_chunk_boundary_is_the_next_position_and_not_the_neighbour_in_memory() -> None:
    """radixark/miles#885: behind the first chunk of a rank lies its second one, whose first token is no label."""
    tokens = torch.arange(100, 108)
    labels = tokens.roll(-1)
    held = [from_canonical(x, 2, 0, "zigzag") for x in (tokens, labels)]
    assert held[0].tolist() == [100, 101, 106, 107] and held[1].tolist() == [101, 102, 107, 100]
    assert held[0].roll(-1).tolist()[1] == 106, "the neighbour in memory would be this one"


@pytest.mark.parametrize("starts", [[], [5], [3, 4, 11], [8]])
def test_documents_that_start_again_are_accepted_where_they_lie(starts: list[int]) -> None:
    ids = _documents(16, starts)
    for size, rank in itertools.chain.from_iterable(((n, r) for r in range(n)) for n in (2, 4)):
        held, at = from_canonical(ids, size, rank, "zigzag"), rank_positions(16, size, rank, "zigzag")
        assert first_contradiction(held, at) is None
        if not starts:
            swapped = held.clone()
            swapped[[0, 1]] = held[[1, 0]]
            assert first_contradiction(swapped, at) is not None


def test_ids_beyond_a_position_or_with_a_gap_are_seen_though_documents_start_again() -> None:
    at = torch.tensor([0, 1, 6, 7])
    for ids, column in (([0, 1, 0, 2], 3), ([1, 0, 6, 7], 0), ([0, 2, 0, 1], 1)):
        assert first_contradiction(torch.tensor(ids), at) == column, ids


LENGTHS, BOUNDS = (50, 0, 64, 3), (0, 64, 64, 128, 192)
"""Tokens of four sequences, and where their rows lie with padding; one is empty."""


def _packed_ids(through_the_pack: bool, padding: int = 0) -> torch.Tensor:
    """Position ids [192] of the pack: from every sequence's start, or through it all; `padding` in rows of padding."""
    ids = torch.full((BOUNDS[-1],), padding)
    for start, length in zip(BOUNDS, LENGTHS, strict=False):
        ids[start : start + length] = torch.arange(length) + start * through_the_pack
    return ids


@pytest.mark.parametrize("through_the_pack", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_pack_is_cut_sequence_by_sequence_and_another_cut_is_seen(
    size: int, through_the_pack: bool
) -> None:
    """verl#4250, modelscope/ms-swift#10071: a pack cut as one sequence, or contiguously."""
    ids = _packed_ids(through_the_pack, padding=10**6)
    cuts = {
        "as one zigzag sequence": lambda rank: rank_positions(len(ids), size, rank, "zigzag"),
        "contiguously": lambda rank: rank_positions(len(ids), size, rank, "contiguous"),
        "every sequence contiguously": lambda rank: packed_rank_rows(BOUNDS, size, rank, "contiguous"),
    }
    seen = dict.fromkeys(cuts, 0)
    for rank in range(size):
        layout = Layout(size, rank)
        right = ids[packed_rank_rows(BOUNDS, size, rank, "zigzag")]
        require_packed_positions(right.unsqueeze(0), BOUNDS, LENGTHS, layout)
        for name, cut in cuts.items():
            try:
                require_packed_positions(ids[cut(rank)].unsqueeze(0), BOUNDS, LENGTHS, layout)
            except PositionMismatchError as error:
                assert f"rank {rank} of {size} has position id" in str(error), error
                seen[name] += 1
    print(seen)
    # A rank whose rows are those of a document that starts again may see nothing; one that does stops the job.
    assert min(seen.values()) >= size - 1


def test_documents_inside_a_packed_sequence_may_start_again() -> None:
    ids = _packed_ids(False)
    ids[20:50] = torch.arange(30)
    for rank in range(2):
        held = ids[packed_rank_rows(BOUNDS, 2, rank, "zigzag")]
        require_packed_positions(held.unsqueeze(0), BOUNDS, LENGTHS, Layout(2, rank))


def test_the_hook_looks_once_a_shape_and_only_at_ids_cut_with_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(positions, "layout_of", lambda *_: Layout(2, 1))
    right = rank_positions(8, 2, 1, "zigzag").unsqueeze(0)
    wrong = rank_positions(8, 2, 1, "contiguous").unsqueeze(0)

    def call(model: Any, *args: Any, **kwargs: Any) -> None:
        check_positions(model, args, kwargs)

    class Model(torch.nn.Module):
        config = None

        def forward(self, input_ids: Any, position_ids: Any, packed_seq_params: Any = None) -> None:
            """Upstream's first arguments."""

    model = Model()
    for arguments in (
        {"args": (wrong, wrong)},
        {"kwargs": {"input_ids": wrong, "position_ids": wrong}},
        {"args": (wrong,), "kwargs": {"position_ids": wrong}},
    ):
        with pytest.raises(PositionMismatchError):
            call(model, *arguments.get("args", ()), **arguments.get("kwargs", {}))  # type: ignore[arg-type]
    call(model, wrong, None)
    call(model, wrong, torch.arange(8).unsqueeze(0))
    pack = SimpleNamespace(qkv_format="thd", cu_seqlens_q=[0, 4, 8], cu_seqlens_kv=[0, 4, 8])
    for arguments in (
        {"args": (wrong, wrong, pack)},
        {"args": (wrong, wrong), "kwargs": {"packed_seq_params": pack}},
    ):
        with pytest.raises(PositionMismatchError, match="packed sequence"):
            call(model, *arguments["args"], **arguments.get("kwargs", {}))  # type: ignore[arg-type, misc]
    packed = packed_rank_rows((0, 4, 8), 2, 1, "zigzag").unsqueeze(0)
    call(model, packed % 4, packed % 4, packed_seq_params=pack)
    call(model, right, right)
    # A known shape waits for no device.
    call(model, wrong, wrong)
    call(model, wrong, wrong, packed_seq_params=pack)
