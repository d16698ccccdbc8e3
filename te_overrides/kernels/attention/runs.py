"""Position maps: which positions of which sequence the rows of a tensor hold.

A map is a tuple of runs. A context-parallel rank's zigzag rows are two runs of one sequence, a packed batch is one or
two runs a sequence, an arbitrary ascending map is as many runs as it has gaps. The kernels get runs cut into tiles, a
line of a table for each program, so the layout is data that no arithmetic sees.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from te_overrides.kernels.attention.reference import AttentionError, Mask
from te_overrides.kernels.zigzag.reference import rank_positions

# Farther than any position, and small enough that two of them add up in int32.
FAR = 1 << 29


@dataclass(frozen=True)
class Run:
    """Consecutive rows that hold consecutive positions of one sequence.

    Attributes:
        row: first row, in the tensor whose rows are mapped.
        count: number of rows.
        position: position of the first row in its sequence. Below 0 and behind the sequence there are no keys.
        origin: row of position 0, in the tensor that holds the whole sequence's other side.
        length: positions of the whole sequence, which lie in `origin` … `origin + length - 1`.
    """

    row: int
    count: int
    position: int
    origin: int
    length: int

    def __post_init__(self) -> None:
        if min(self.row, self.count, self.origin, self.length) < 0:
            raise AttentionError(f"{self}: rows, counts and lengths are 0 or more")
        if max(self.row + self.count, abs(self.position) + self.count, self.origin + self.length) >= FAR:
            raise AttentionError(f"{self}: attention addresses fewer than {FAR} rows and positions")


def runs_of(positions: torch.Tensor, row: int, origin: int, length: int) -> tuple[Run, ...]:
    """Runs of rows `row` … that hold `positions` (int64 on the CPU, ascending) of one sequence."""
    if not positions.numel():
        return ()
    cuts = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
    bounds = [0, *cuts, positions.numel()]
    return tuple(
        Run(row + start, stop - start, int(positions[start]), origin, length)
        for start, stop in itertools.pairwise(bounds)
    )


@functools.lru_cache(maxsize=4096)
def runs_of_rank(
    padded: int, length: int, cp_size: int, rank: int, layout: str, row: int, origin: int
) -> tuple[Run, ...]:
    """Runs of what a context-parallel rank holds of one sequence, padding left out.

    Args:
        padded: positions of the sequence with its padding behind it; the layout cuts those.
        length: positions without padding.
        row: the rank's first row of the sequence.
        origin: row of position 0 where the whole sequence lies.

    Raises:
        LayoutError: a length that the layout cannot cut.
    """
    positions = rank_positions(padded, cp_size, rank, layout)
    return runs_of(positions[positions < length], row, origin, length)


def by_sequence(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one sequence together, in the order given."""
    return [list(group) for _, group in itertools.groupby(runs, key=lambda run: (run.origin, run.length))]


def covered(runs: Sequence[Run]) -> int:
    """Number of rows that the runs map."""
    return sum(run.count for run in runs)


@functools.lru_cache(maxsize=256)
def work_table(
    runs: tuple[Run, ...], tile: int, left: int, right: int, device: torch.device
) -> torch.Tensor | None:
    """Runs cut into tiles, those with the most to do first.

    Args:
        tile: rows of one program.
        left, right: how far before and behind its own position a row sees the other side.

    Returns:
        int32 [programs, 5] on `device`: first row, rows, position of the first row, `origin`, `length`; None for no
        rows. Cached: a copy to the device waits for the stream.
    """
    lines = []
    for run in runs:
        for start in range(0, run.count, tile):
            rows = min(tile, run.count - start)
            position = run.position + start
            seen = min(run.length, position + rows + right) - max(position - left, 0)
            lines.append((seen, (run.row + start, rows, position, run.origin, run.length)))
    if not lines:
        return None
    lines.sort(key=lambda line: -line[0])
    return torch.tensor([line for _, line in lines], dtype=torch.int32).to(device)


def reach(mask: Mask) -> tuple[int, int]:
    """(left, right) of a mask as the kernels take them."""
    left, right = (FAR if side is None else min(side, FAR) for side in (mask.left, mask.right))
    return left, right
