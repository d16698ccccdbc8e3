"""Do the batch's position ids say what the context-parallel layout says?

Attention, RoPE and the sums over tokens take a row's position from the layout; the batch was cut by somebody else. Cut
contiguously where zigzag is expected, shapes fit and every answer is wrong (verl#4250, verl#1332, ms-swift#10071,
radixark/miles#885). Position ids are cut with the tokens, so they are the one witness of it.

What is checked: at a model's first forward and for every new shape, ids as long as the tokens under more than one
context-parallel rank. Documents may start again anywhere (`reset_position_ids`), also in another rank's rows; so ids
count upwards inside a chunk, or start at 0, and never exceed the layout's positions. A batch cut contiguously breaks
that on every rank but the first, which stops the job. Of packed sequences every one is cut by itself, and ids count
from its start, or through the pack; in padding they may be anything. What is not checked: batches without ids, and ids
that were not cut with the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_plugins.call_arguments import call_arguments
from megatron_plugins.packed_order import Boundaries, boundaries, read
from megatron_plugins.parallel_layout import ParallelLayout, layout_of
from te_overrides.kernels.zigzag.reference import packed_rank_rows, rank_positions


class PositionMismatchError(RuntimeError):
    """The tokens of this rank are others than those that the layout gives it."""


def first_contradiction(ids: torch.Tensor, positions: torch.Tensor) -> int | None:
    """The first column of one batch row whose id cannot stand at that position; None if there is none.

    Args:
        ids: int64 [s] on the CPU, position ids of a rank's tokens.
        positions: int64 [s] on the CPU, ascending; where the layout puts them.
    """
    wrong = ids > positions
    inside = positions[1:] == positions[:-1] + 1
    wrong[1:] |= inside & (ids[1:] != ids[:-1] + 1) & (ids[1:] != 0)
    found = wrong.nonzero()
    return int(found[0]) if found.numel() else None


def require_positions(ids: torch.Tensor, layout: ParallelLayout) -> None:
    """Verify position ids [b, s_local] of this rank.

    Raises:
        PositionMismatchError: a row that the layout cannot have given to this rank.
    """
    rows = ids.detach().to("cpu", torch.int64)
    positions = rank_positions(
        rows.shape[1] * layout.cp_size, layout.cp_size, layout.cp_rank, layout.cp_layout
    )
    for index, row in enumerate(rows):
        column = first_contradiction(row, positions)
        if column is not None:
            raise PositionMismatchError(
                f"batch row {index}, token {column} of context-parallel rank {layout.cp_rank} of {layout.cp_size} has "
                f"position id {int(row[column])}; the {layout.cp_layout} layout puts position "
                f"{int(positions[column])} there. Cut tokens, labels, masks and position ids with "
                "megatron.core.utils.get_batch_on_this_cp_rank; a batch cut contiguously gives wrong answers."
            )


def require_packed_positions(
    ids: torch.Tensor, bounds: Boundaries, lengths: Sequence[int], layout: ParallelLayout
) -> None:
    """Verify position ids [1, t_local] of this rank's rows of a pack.

    Args:
        bounds: of the rows that sequences take on the token axis of all ranks, padding included.
        lengths: tokens of every sequence, padding left out.

    Raises:
        PositionMismatchError: a row that the layout cannot have given to this rank.
        LayoutError: boundaries that the layout cannot cut.
    """
    rows = packed_rank_rows(bounds, layout.cp_size, layout.cp_rank, layout.cp_layout)
    starts = torch.tensor(bounds, dtype=torch.int64)
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    within = rows - starts[sequence]
    tokens = (within < torch.tensor([*lengths, 0])[sequence]).nonzero().squeeze(1)
    held = ids.detach().to("cpu", torch.int64).view(-1)[tokens]
    column = first_contradiction(held, within[tokens])
    if column is None or torch.equal(held, rows[tokens]):
        return
    row = int(tokens[column])
    raise PositionMismatchError(
        f"row {row} of context-parallel rank {layout.cp_rank} of {layout.cp_size} has position id "
        f"{int(held[column])}; the {layout.cp_layout} layout puts position {int(within[row])} of packed sequence "
        f"{int(sequence[row])} there. Cut every sequence of a pack by itself, tokens, labels, masks and position ids "
        "alike (TransformerEngine's thd_get_partitioned_indices does); a pack cut in another way gives wrong answers."
    )


def _context_parallel_layouts(model: Any) -> set[ParallelLayout]:
    """What the modules of a model go by: one layout, unless somebody told them different things."""
    said = {getattr(module, "layout", None) for module in model.modules()}
    found = {layout for layout in said if isinstance(layout, ParallelLayout)}
    if not found:
        groups = getattr(model, "pg_collection", None) or getattr(model, "model_comm_pgs", None)
        found = {layout_of(model.config, getattr(groups, "tp", None), getattr(groups, "cp", None))}
    return {layout for layout in found if layout.cp_size > 1}


def check_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a deterministic GPTModel: `forward(input_ids, position_ids, …)`; cheap for a known shape.

    Raises:
        PositionMismatchError: as `require_positions`, or for packed sequences `require_packed_positions`.
    """
    given = call_arguments(model, args, kwargs)
    ids, tokens, packed = (given.get(name) for name in ("position_ids", "input_ids", "packed_seq_params"))
    if not isinstance(ids, torch.Tensor):
        return
    if not isinstance(tokens, torch.Tensor) or ids.shape != tokens.shape:
        return
    known: set[tuple[torch.Size, bool]] = model.__dict__.setdefault("checked_position_shapes", set())
    if (shape := (ids.shape, packed is not None)) in known:
        return
    for layout in _context_parallel_layouts(model):
        if packed is None:
            require_positions(ids, layout)
        else:
            lengths = [stop - start for start, stop in itertools.pairwise(read(packed.cu_seqlens_q))]
            require_packed_positions(ids, boundaries(packed), lengths, layout)
    known.add(shape)
