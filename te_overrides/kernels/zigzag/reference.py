"""Which positions of a sequence a context-parallel rank holds: the only definition in this project.

    zigzag       2*CP chunks, rank r holds chunk r, then chunk 2*CP-1-r.     CP = 2:  0 3 | 1 2
    contiguous   CP chunks, rank r holds chunk r.                            CP = 2:  0 | 1

Zigzag balances causal work: with one chunk from each end every rank sees as many (query, key) pairs. Confusing the two
layouts, or labelling the first token after a chunk boundary by its neighbour in memory, goes unnoticed by shapes
(verl#4250, verl#1332, ms-swift#10071). So nobody else computes chunk arithmetic: kernels, loss, granules and batch
cutting all ask here. The layouts are those of Megatron (`get_batch_on_this_cp_rank`) and TransformerEngine.

A rank's positions ascend in both layouts; attention relies on it. In packed sequences every sequence is cut by itself
(TransformerEngine's thd): a rank holds its chunks of sequence 0, then its chunks of sequence 1, and so on.

With one rank every layout is the identity and any length is allowed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

LAYOUTS = ("zigzag", "contiguous")


class LayoutError(ValueError):
    """A layout that does not exist, a rank outside its group, or a length that the layout cannot cut evenly."""


class ZigzagError(LayoutError):
    """A length that 2 * CP chunks do not divide."""


def chunks_per_rank(layout: str) -> int:
    """Number of chunks of a sequence that one rank holds: 2 for zigzag, 1 for contiguous.

    Raises:
        LayoutError: no such layout.
    """
    if layout not in LAYOUTS:
        raise LayoutError(
            f"context-parallel layout {layout!r} is not known; known layouts: {', '.join(map(repr, LAYOUTS))}"
        )
    return 2 if layout == "zigzag" else 1


def length_multiple(cp_size: int, layout: str) -> int:
    """The number that must divide the length of a sequence; pad a sequence to a multiple of it.

    Raises:
        LayoutError: no such layout, or a degree below 1.
    """
    chunks = chunks_per_rank(layout)
    if cp_size < 1:
        raise LayoutError(f"context-parallel size is {cp_size}; it must be at least 1")
    return 1 if cp_size == 1 else cp_size * chunks


def check_length(length: int, cp_size: int, layout: str, what: str = "sequence length") -> None:
    """Verify that `length` positions can be cut evenly.

    Args:
        what: names the length in the message.

    Raises:
        ZigzagError: zigzag, and 2 * CP does not divide the length.
        LayoutError: contiguous, and CP does not divide the length; or arguments that name no layout.
    """
    multiple = length_multiple(cp_size, layout)
    if length % multiple:
        padded = (length + multiple - 1) // multiple * multiple
        error, rule = (
            (ZigzagError, f"2 * {cp_size} chunks")
            if layout == "zigzag"
            else (LayoutError, f"{cp_size} chunks")
        )
        raise error(
            f"{what} {length} cannot be laid out as {layout} over {cp_size} context-parallel ranks: "
            f"{rule} need a multiple of {multiple}; pad it to {padded}"
        )


def rank_positions(seq_len: int, cp_size: int, rank: int, layout: str) -> Tensor:
    """Positions of the rows that a rank holds, in the order in which it holds them (ascending).

    Args:
        seq_len: length of the whole sequence.
        cp_size: context-parallel degree; any number from 1.
        rank: rank within the context-parallel group.
        layout: "zigzag" or "contiguous".

    Returns:
        int64 [seq_len // cp_size] on the CPU.

    Raises:
        LayoutError: unknown layout, rank outside the group, uneven length (ZigzagError for zigzag).
    """
    check_length(seq_len, cp_size, layout)
    if not 0 <= rank < cp_size:
        raise LayoutError(f"rank {rank} is outside a context-parallel group of {cp_size} ranks")
    if cp_size == 1:
        return torch.arange(seq_len)
    if layout == "contiguous":
        size = seq_len // cp_size
        return torch.arange(rank * size, (rank + 1) * size)
    size = seq_len // (2 * cp_size)
    last = 2 * cp_size - 1 - rank
    return torch.cat(
        [torch.arange(rank * size, (rank + 1) * size), torch.arange(last * size, (last + 1) * size)]
    )


def to_canonical(
    gathered: Sequence[Tensor] | Tensor,
    layout: str,
    dim: int = 0,
    *,
    cp_size: int | None = None,
    cu_seqlens: tuple[int, ...] | None = None,
) -> Tensor:
    """Bring what all ranks hold into the order of positions.

    Args:
        gathered: one tensor a rank, in rank order, all of one shape; or those tensors concatenated along `dim`,
            with `cp_size` given. Entries along `dim` may be positions or anything that cuts like them (granules).
        layout: "zigzag" or "contiguous".
        dim: the dimension of positions.
        cp_size: number of ranks; required for a concatenated tensor, verified for a sequence.
        cu_seqlens: boundaries of packed sequences among the entries of all ranks, as `packed_rank_rows` takes them;
            None is one sequence.

    Returns:
        One tensor, contiguous unless a single rank's tensor is returned as it is.

    Raises:
        LayoutError: unknown layout, ranks that do not match `cp_size` or each other, uneven length, boundaries that
            end elsewhere than the entries do.
    """
    chunks = chunks_per_rank(layout)
    if isinstance(gathered, Tensor):
        if cp_size is None:
            raise LayoutError(
                "to_canonical: a concatenated tensor does not tell the number of ranks; pass cp_size"
            )
        check_length(
            gathered.shape[dim], cp_size, layout, f"dimension {dim} of {tuple(gathered.shape)}, length"
        )
        parts: Sequence[Tensor] = (
            gathered.chunk(cp_size, dim) if gathered.shape[dim] else [gathered] * cp_size
        )
    else:
        parts = gathered
        if cp_size is not None and cp_size != len(parts):
            raise LayoutError(
                f"to_canonical: {len(parts)} tensors for cp_size {cp_size}; give one tensor a rank"
            )
    if not parts:
        raise LayoutError("to_canonical: no tensors; give one tensor a rank")
    if len(parts) == 1:
        return parts[0]
    length = parts[0].shape[dim]
    for rank, part in enumerate(parts):
        if part.shape[dim] != length:
            raise LayoutError(
                f"to_canonical: rank {rank} holds {part.shape[dim]} positions, rank 0 holds {length}; "
                "a layout gives every rank as many"
            )
    if cu_seqlens is not None:
        check_packed_rows(cu_seqlens, length, len(parts), layout)
        shape = list(parts[0].shape)
        shape[dim] = cu_seqlens[-1]
        out = parts[0].new_empty(shape)
        # Each rank's rows go where they belong: no second copy of what all ranks hold.
        for rank, part in enumerate(parts):
            out.index_copy_(dim, _packed_places(cu_seqlens, len(parts), rank, layout, part.device), part)
        return out
    check_length(length * len(parts), len(parts), layout)
    if chunks == 1 or length == 0:
        return torch.cat(list(parts), dim)
    size = length // 2
    first = [part.narrow(dim, 0, size) for part in parts]
    second = [part.narrow(dim, size, size) for part in reversed(parts)]
    return torch.cat(first + second, dim)


def from_canonical(x: Tensor, cp_size: int, rank: int, layout: str, dim: int = 0) -> Tensor:
    """The rows of `x` that a rank holds: the inverse of `to_canonical`.

    Args:
        x: a tensor in the order of positions along `dim`.

    Returns:
        Contiguous copy of the rank's rows; `x` itself with one rank.

    Raises:
        LayoutError: as for `rank_positions`.
    """
    positions = rank_positions(x.shape[dim], cp_size, rank, layout)
    return x if cp_size == 1 else x.index_select(dim, positions.to(x.device))


def check_packed(cu_seqlens: Sequence[int], cp_size: int, layout: str) -> None:
    """Verify boundaries of packed sequences, each of which is laid out over the ranks by itself.

    Args:
        cu_seqlens: boundaries of the (padded) sequences on the token axis: n + 1 numbers for n sequences.

    Raises:
        LayoutError: boundaries that do not start at 0 or descend; a sequence whose length the layout cannot cut, named
            with the length to pad it to.
    """
    if not cu_seqlens or cu_seqlens[0] != 0:
        raise LayoutError(
            f"boundaries of packed sequences are n + 1 numbers that start at 0, found {list(cu_seqlens[:4])}"
        )
    for index, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        if stop < start:
            raise LayoutError(
                f"sequence {index} of the packed batch starts at {start} and ends at {stop}; boundaries never descend"
            )
        check_length(stop - start, cp_size, layout, f"sequence {index} of the packed batch, length")


def check_packed_rows(cu_seqlens: Sequence[int], rows: int, cp_size: int, layout: str) -> None:
    """`check_packed`, and that the boundaries end where `rows` rows on each rank do.

    Raises:
        LayoutError: as `check_packed`; other rows than the boundaries tell.
    """
    check_packed(cu_seqlens, cp_size, layout)
    if cu_seqlens[-1] != rows * cp_size:
        raise LayoutError(
            f"the boundaries end at {cu_seqlens[-1]}, but {cp_size} ranks hold {rows} rows each, {rows * cp_size} in "
            "all; boundaries are those of the whole batch (not divided by the context-parallel size), and rows behind "
            "the last sequence belong to its padding"
        )


@functools.lru_cache(maxsize=64)
def _packed_places(
    cu_seqlens: tuple[int, ...], cp_size: int, rank: int, layout: str, device: torch.device
) -> Tensor:
    """`packed_rank_rows` on the device.

    Cached: a copy to the device waits for the stream, and every gradient of a step asks for the same.
    """
    return packed_rank_rows(cu_seqlens, cp_size, rank, layout).to(device)


def packed_rank_rows(cu_seqlens: Sequence[int], cp_size: int, rank: int, layout: str) -> Tensor:
    """Rows of the packed token axis that a rank holds, every sequence cut by itself.

    Args:
        cu_seqlens: boundaries of the (padded) sequences on the token axis, ascending from 0: n + 1 numbers for n
            sequences. Zero-length sequences are allowed.

    Returns:
        int64 [cu_seqlens[-1] // cp_size] on the CPU, in the order in which the rank holds them.

    Raises:
        LayoutError: as `check_packed`. Cutting the boundaries themselves (`cu_seqlens // cp_size`) would move them into
            the neighbours.
    """
    check_packed(cu_seqlens, cp_size, layout)
    rows = [torch.empty(0, dtype=torch.int64)]
    for start, stop in itertools.pairwise(cu_seqlens):
        rows.append(start + rank_positions(stop - start, cp_size, rank, layout))
    return torch.cat(rows)
