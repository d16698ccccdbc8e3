"""Sums over ranks in one order: bytes move in rank order, a local balanced tree adds (docs/numbers.md, "Collectives").

The library's own all-reduce picks ring, tree or recursive halving by size and topology, and its chunking by the
buffer a tensor happens to lie in; with it goes the order of the sum. Here a collective only moves bytes. What is
added is added by every rank alike: the balanced tree in rank order, one rounding per add in the payload's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives import selection
from te_overrides.kernels.collectives.agreement import require_agreement
from te_overrides.kernels.collectives.buffers import CollectiveError as CollectiveError
from te_overrides.kernels.collectives.buffers import copied, require_apart, require_out
from te_overrides.kernels.collectives.streams import Ready
from te_overrides.kernels.collectives.transport import (
    all_gather,
    as_bytes,
    described_movement,
    group_rank,
    group_size,
    start_all_gather,
    start_all_to_all,
)
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.tree.reference import balanced_tree

SUM_WORLDS = tuple(1 << level for level in range(13))
"""World sizes of sums: a rank's share must be a whole subtree. Movement takes any size."""


def check_sum_world(size: int) -> None:
    """Sums are defined over a power of two of ranks, so that a rank's share is a whole subtree.

    Raises:
        CollectiveError: any other size.
    """
    if size not in SUM_WORLDS:
        raise CollectiveError(
            f"a fixed-tree sum over {size} ranks was asked for; the balanced tree of the numbers contract is defined "
            f"over 1, 2, 4, 8, … ranks. Choose a power of two as the tensor-parallel degree."
        )


class Sum:
    """A sum under way. `wait` adds what arrived and returns it; a second `wait` returns it again.

    On a GPU the current stream adds. A later wait on another stream waits for these additions.
    """

    def __init__(self, finish: Callable[[], list[torch.Tensor]]) -> None:
        self._finish: Callable[[], list[torch.Tensor]] | None = finish
        self._result: Ready | None = None

    @classmethod
    def of(cls, results: Sequence[torch.Tensor]) -> Sum:
        """A sum that the current stream has made already."""
        done = cls(list)
        done._finish, done._result = None, Ready(results, event=False)
        return done

    def wait_all(self) -> list[torch.Tensor]:
        """One tensor for every tensor that was given."""
        if self._finish is not None:
            self._result, self._finish = Ready(self._finish()), None
        assert self._result is not None
        return self._result.take()

    def wait(self) -> torch.Tensor:
        """The tensor, where one was given."""
        (result,) = self.wait_all()
        return result


def _tree(terms: Sequence[torch.Tensor], wide: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The balanced tree in the dtype of the terms, or (wide) in float32 and rounded once."""
    dtype = terms[0].dtype
    total = (
        balanced_tree([term.to(torch.float32) for term in terms]).to(dtype) if wide else balanced_tree(terms)
    )
    return total if out is None else out.copy_(total)


def _agreed(operation: str, tensors: Sequence[torch.Tensor], wide: bool, group: dist.ProcessGroup) -> int:
    """Number of this sum in its group, once the ranks agree on it.

    The setting as it stands: a value that means nothing is refused after the ranks have agreed on it.
    """
    call = (operation, selection.said(), wide, *((x.dtype, x.shape) for x in tensors))
    return require_agreement(call, group, tensors[0].device, words=_described)


def _described(call: tuple[Any, ...]) -> str:
    """What a sum is in a message; first what a long list of shapes must not push out of it."""
    operation, setting, wide, *operands = call
    shapes = ", ".join(f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for dtype, shape in operands)
    how = "" if setting == selection.SETTINGS[0] else f" with {selection.VARIABLE}={setting}"
    return f"{operation}{how}{' added in float32' if wide else ''} of {shapes}"


def _over_one_rank(tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None]) -> Sum:
    """The tensors, in their buffers at once."""
    return Sum.of(copied(tensors, outs))


@eager_only
def start_all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, wide: bool = False, out: torch.Tensor | None = None
) -> Sum:
    """`all_reduce` that returns at once; `x` must not be written before `wait`."""
    size = group_size(group)
    check_sum_world(size)
    require_out(out, x.shape, x.dtype)
    if size == 1:
        return _over_one_rank([x], [out])
    assert group is not None
    number = _agreed("all_reduce", [x], wide, group)
    transport = selection.transport_of("all_reduce", x, x.numel() * x.element_size(), group)
    if transport == "peers":
        from te_overrides.kernels.collectives.peer import start_all_reduce_by_peers

        return start_all_reduce_by_peers(x, *selection.peers_of(group), wide=wide, out=out)
    if transport == "nodes":
        from te_overrides.kernels.collectives.nodes import start_all_reduce_over_nodes

        return start_all_reduce_over_nodes(x, selection.nodes_of_group(group), number, wide=wide, out=out)
    if transport == "shares":
        return _start_by_shares(x, group, number, wide, out)
    moving = start_all_gather(x, group, agreed=True)
    return Sum(lambda: [_tree(moving.wait(), wide, out)])


def _start_by_shares(
    x: torch.Tensor, group: dist.ProcessGroup, number: int, wide: bool, out: torch.Tensor | None
) -> Sum:
    """An all-reduce of which every rank adds a share: it receives 2 (n - 1) / n times the operand, not n - 1 times."""
    size = group_size(group)
    flat = x.detach().reshape(-1)
    share = -(-flat.numel() // size)
    padded = torch.nn.functional.pad(flat, (0, share * size - flat.numel()))
    moving = start_all_to_all(list(padded.view(size, share)), group, agreed=True)

    def finish() -> list[torch.Tensor]:
        # Sums of one shape that ranks wait for in another order would be gathered from each other's shares.
        require_agreement("the shares", group, x.device, continues=number)
        shares = all_gather(_tree(moving.wait(), wide, None), group, agreed=True)
        total = torch.cat(shares)[: flat.numel()].view(x.shape)
        return [total if out is None else out.copy_(total)]

    return Sum(finish)


@eager_only
def all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, wide: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The balanced tree over ranks of `x`, on every rank.

    Args:
        x: any shape and floating dtype.
        wide: add in float32 and round once, instead of once an addition.
        out: where the sum goes, `x` itself included. Without it a new tensor; over one rank `x` itself.

    Raises:
        CollectiveError: a world size that is no power of two, an `out` that does not fit.
        DisagreementError, MissingRankError: ranks that call with other shapes, dtypes, operations or settings of the
            transport, or in another order; a rank that does not come (`agreement.py` says what is found when).
    """
    return start_all_reduce(x, group, wide=wide, out=out).wait()


@eager_only
def start_reduce_scatter_many(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    wide: bool = False,
    outs: Sequence[torch.Tensor | None] | None = None,
) -> Sum:
    """`reduce_scatter_many` that returns at once; the tensors may be written afterwards."""
    size = group_size(group)
    check_sum_world(size)
    for x in tensors:
        if not x.dim() or x.shape[0] % size:
            raise CollectiveError(
                f"reduce_scatter over {size} ranks needs dim 0 divisible by {size}, got {tuple(x.shape)}: pad the "
                f"sequence so that the tensor-parallel degree divides it."
            )
    given = list(outs) if outs is not None else [None] * len(tensors)
    shapes = [torch.Size((x.shape[0] // size, *x.shape[1:])) for x in tensors]
    for x, out, shape in zip(tensors, given, shapes, strict=True):
        require_out(out, shape, x.dtype)
    require_apart(given)
    if size == 1:
        return _over_one_rank(tensors, given)
    assert group is not None
    number = _agreed("reduce_scatter", tensors, wide, group)
    sizes = [x.numel() * x.element_size() for x in tensors]
    transport = selection.transport_of("reduce_scatter", tensors[0], sum(sizes), group)
    if transport == "peers":
        from te_overrides.kernels.collectives.peer import start_reduce_scatter_by_peers

        return start_reduce_scatter_by_peers(tensors, *selection.peers_of(group), wide=wide, outs=given)
    if transport == "nodes":
        from te_overrides.kernels.collectives.nodes import start_reduce_scatter_over_nodes

        return start_reduce_scatter_over_nodes(
            tensors, selection.nodes_of_group(group), number, wide=wide, outs=given
        )
    # One exchange for all of them: a rank's shares lie one after the other, as bytes.
    shares = [as_bytes(x).view(size, x.numel() * x.element_size() // size) for x in tensors]
    moving = start_all_to_all(list(torch.cat(shares, dim=1)), group, agreed=True)
    widths = [share.shape[1] for share in shares]

    def finish() -> list[torch.Tensor]:
        arrived = [piece.split(widths) for piece in moving.wait()]
        sums = []
        for index, (x, out, shape) in enumerate(zip(tensors, given, shapes, strict=True)):
            terms = [parts[index].clone().view(x.dtype).view(shape) for parts in arrived]
            sums.append(_tree(terms, wide, out))
        return sums

    return Sum(finish)


@eager_only
def reduce_scatter_many(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    wide: bool = False,
    outs: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """`reduce_scatter` of several tensors in one exchange, with the bits of one after the other.

    Raises:
        CollectiveError: as for `reduce_scatter`; `outs` that share memory.
    """
    return start_reduce_scatter_many(tensors, group, wide=wide, outs=outs).wait_all()


@eager_only
def start_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, wide: bool = False, out: torch.Tensor | None = None
) -> Sum:
    """`reduce_scatter` that returns at once; `x` may be written afterwards."""
    return start_reduce_scatter_many([x], group, wide=wide, outs=[out])


@eager_only
def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, wide: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's slice along dim 0 of the balanced tree over ranks. A rank receives its own slice alone.

    Args:
        x: [n, ...], n divisible by the number of ranks; any floating dtype.
        wide: add in float32 and round once, instead of once an addition.
        out: where the slice goes. Without it a new tensor; over one rank `x` itself.

    Raises:
        CollectiveError: a world size that is no power of two or does not divide dim 0, an `out` that does not fit.
        DisagreementError, MissingRankError: ranks that call with other shapes, dtypes, operations or settings of the
            transport, or in another order; a rank that does not come (`agreement.py` says what is found when).
    """
    return start_reduce_scatter(x, group, wide=wide, out=out).wait()


def even_cuts(size: int, parts: int) -> list[slice]:
    """`parts` consecutive slices of `size`, as even as possible, the first ones one longer."""
    base, extra = divmod(size, parts)
    cuts, start = [], 0
    for i in range(parts):
        stop = start + base + (1 if i < extra else 0)
        cuts.append(slice(start, stop))
        start = stop
    return cuts


@eager_only
def start_exchange_columns(
    x: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[Callable[[], list[torch.Tensor]], slice]:
    """`exchange_columns` that returns at once: what it returns waits for the columns. `x` may be written afterwards."""
    size = group_size(group)
    cuts = even_cuts(x.shape[-1], size)
    own = cuts[group_rank(group)]
    if size == 1:
        return lambda: [x], own
    assert group is not None
    # The whole operand: 7 and 8 columns over 4 ranks would travel in pieces of one width.
    require_agreement(("exchange_columns", x.dtype, x.shape), group, x.device, words=described_movement)
    # A transport moves equal pieces: short slices travel with a column of zeros that the owner drops.
    width = max(cut.stop - cut.start for cut in cuts)
    pieces = []
    for cut in cuts:
        piece = x[..., cut]
        short = width - piece.shape[-1]
        pieces.append(torch.nn.functional.pad(piece, (0, short)) if short else piece)
    moving = start_all_to_all([p.contiguous() for p in pieces], group, agreed=True)
    return lambda: [r[..., : own.stop - own.start] for r in moving.wait()], own


def exchange_columns(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], slice]:
    """All-to-all by columns: every rank's `x` restricted to the columns of its last dim that this rank owns.

    Args:
        x: [..., C], the same shape on every rank.

    Returns:
        One tensor [..., C_own] per source rank, in rank order, and the slice of columns owned here.

    Raises:
        DisagreementError, MissingRankError, CaptureError: see `agreement.require_agreement`.
    """
    moving, own = start_exchange_columns(x, group)
    return moving(), own


@eager_only
def owned(values: torch.Tensor, own: slice, size: int, dim: int = -1) -> torch.Tensor:
    """Zeros of `size` along `dim` with `values` at `own`: what a rank hands to a later sum over ranks."""
    shape = list(values.shape)
    shape[dim] = size
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    out.narrow(dim, own.start, own.stop - own.start).copy_(values)
    return out


def select_contribution(values: Sequence[torch.Tensor], owner: torch.Tensor) -> torch.Tensor:
    """Per element, the value of the rank that `owner` names. `values`: one [...] tensor per rank; `owner`:
    [...] int64."""
    return torch.gather(torch.stack(list(values)), 0, owner.unsqueeze(0)).squeeze(0)
