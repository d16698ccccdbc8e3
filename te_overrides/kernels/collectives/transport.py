"""Moves bytes between the ranks of a group, in rank order, and never adds any.

Every sum over ranks in this project is a tree added locally over what these functions bring (docs/numbers.md,
Collectives). Whatever library moves the bytes, the bits are then the same, and the choice of transport can follow
speed alone.

Tensors travel as raw bytes. A backend therefore needs no support for a dtype (gloo lacks several), and nothing on the
way can convert, flush a subnormal or quieten a NaN. A group of `None` is a group of one: tensor parallelism or context
parallelism that is off is spelled like that in the callers, and never means the default process group.

Here every movement passes, so here ranks agree on it (`agreement.py`): operation, dtype, shape, order. Whatever moves
has one shape on all ranks; callers whose shares differ (columns, units, runs of rows) pad them to one, and shards that
somebody left uneven are refused by name. What differs rank by rank without a bearing on shapes, such as the boundaries
of packed sequences, callers agree on themselves. A sum is agreed on as a sum, and moves its parts with `agreed`.

Nothing here is differentiable: results are detached. Callers are autograd functions that state their own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_overrides.kernels import accounting
from te_overrides.kernels.collectives.agreement import require_agreement
from te_overrides.kernels.collectives.buffers import copied, require_out
from te_overrides.kernels.collectives.streams import Ready, read_here

# torch 2.13 renamed the call and warns at every use of the old name; older ones know only that.
_all_gather_bytes = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank within `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


class Exchange:
    """Bytes under way. `wait` returns what arrived; a second `wait` returns it again.

    Args:
        work: the library's handle.
        held: what it reads and writes.
        finish: what arrived, one tensor a rank, in memory that `held` or the caller holds.
    """

    def __init__(self, work: Any, held: Sequence[Tensor], finish: Callable[[], list[Tensor]]) -> None:
        self._under_way: tuple[Any, Sequence[Tensor], Callable[[], list[Tensor]]] | None = (
            work,
            held,
            finish,
        )
        self._arrived: Ready | None = None

    @classmethod
    def of(cls, arrived: Sequence[Tensor]) -> Exchange:
        """An exchange that brings nothing from elsewhere."""
        exchange = cls(None, (), list)
        exchange._under_way, exchange._arrived = None, Ready(arrived, event=False)
        return exchange

    def wait(self) -> list[Tensor]:
        """One tensor a rank, in rank order. On a GPU the current stream waits, not the host; any stream may be the
        first to wait, and others may wait after it."""
        if self._under_way is not None:
            work, held, finish = self._under_way
            work.wait()
            # Made on the stream that started, read on this one. What was sent is gone from the host now, and this
            # stream is the one that knows when it has left.
            read_here(held)
            self._arrived, self._under_way = Ready(finish()), None
        assert self._arrived is not None
        return self._arrived.take()


def _require_agreement(operation: str, x: Tensor, group: dist.ProcessGroup | None) -> None:
    assert group is not None
    require_agreement((operation, x.dtype, x.shape), group, x.device, words=described_movement)


def described_movement(call: tuple[str, torch.dtype, torch.Size]) -> str:
    """What a movement is in a message."""
    operation, dtype, shape = call
    return f"{operation} of {str(dtype).removeprefix('torch.')} {tuple(shape)}"


def start_all_gather(
    x: Tensor, group: dist.ProcessGroup | None, *, out: Tensor | None = None, agreed: bool = False
) -> Exchange:
    """`all_gather` that returns at once; `x` must not be written before `wait`, nor `out` read or written."""
    world = group_size(group)
    require_out(out, torch.Size((world * x.shape[0], *x.shape[1:]) if x.dim() else (world,)), x.dtype)
    if world == 1:
        if out is not None:
            copied([x.detach().reshape(out.shape)], [out])
        return Exchange.of([x.detach()] if out is None else _shares(out, x, world))
    if not agreed:
        _require_agreement("all_gather", x, group)
    if x.numel() == 0:
        return Exchange.of(
            [torch.empty_like(x) for _ in range(world)] if out is None else _shares(out, x, world)
        )
    payload, received = as_bytes(x), None if out is None else _bytes_in_place(x, out, group_rank(group))
    direct = received is not None
    if received is None:
        received = torch.empty(world * payload.numel(), dtype=torch.uint8, device=x.device)
    work = _all_gather_bytes(received, payload, group=group, async_op=True)
    accounting.bytes_sent(payload.numel() * (world - 1), "all_gather")

    def finish(received: Tensor = received) -> list[Tensor]:
        if out is None:
            return [_from_bytes(piece, x) for piece in received.chunk(world)]
        if not direct:
            out.copy_(received.view(x.dtype).view(out.shape))
        return _shares(out, x, world)

    return Exchange(work, (payload, received), finish)


def _shares(out: Tensor, x: Tensor, world: int) -> list[Tensor]:
    """Of each rank its part of `out`, shaped like `x`."""
    whole = out.detach()
    if not x.dim():
        return list(whole.unbind())
    return [whole.narrow(0, rank * x.shape[0], x.shape[0]) for rank in range(world)]


def _bytes_in_place(x: Tensor, out: Tensor, rank: int) -> Tensor | None:
    """The bytes of `out`, where a library may write what arrives: they lie in a row, and `x` is not among them, or at
    its own place."""
    if not out.is_contiguous() or out.is_neg() or out.is_conj():
        return None
    own = out.data_ptr() + rank * x.numel() * x.element_size()
    apart = x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    at_home = x.data_ptr() == own and x.is_contiguous() and not (x.is_neg() or x.is_conj())
    return as_bytes(out) if apart or at_home else None


def all_gather(
    x: Tensor, group: dist.ProcessGroup | None, *, out: Tensor | None = None, agreed: bool = False
) -> list[Tensor]:
    """Bring every rank's `x` to every rank.

    Args:
        x: any shape and dtype, the same on all ranks of the group.
        group: the process group, or None for a group of one.
        out: [ranks * n, ...] for an `x` of [n, ...], [ranks] for a number: where the tensors go, one after the other.
            `x` may be this rank's own rows of it (in place), or lie elsewhere in it.
        agreed: the ranks have agreed on what this is a part of.

    Returns:
        One tensor a rank, in rank order, shaped like `x`: views of `out`, where there is one. In a group of one it is
        `x` itself, detached, not copied, without `out`.

    Raises:
        CollectiveError: an `out` that does not fit, or in which several elements lie in one place.
        DisagreementError, MissingRankError, CaptureError: see `agreement.require_agreement`.
    """
    return start_all_gather(x, group, out=out, agreed=agreed).wait()


def start_all_to_all(
    pieces: Sequence[Tensor], group: dist.ProcessGroup | None, *, agreed: bool = False
) -> Exchange:
    """`all_to_all` that returns at once; the pieces are copied before it does."""
    world = group_size(group)
    if len(pieces) != world:
        raise ValueError(
            f"all_to_all: {len(pieces)} pieces for a group of {world} ranks; give one piece a rank"
        )
    first = pieces[0]
    for rank, piece in enumerate(pieces):
        if piece.shape != first.shape or piece.dtype != first.dtype:
            raise ValueError(
                f"all_to_all: the piece for rank {rank} is {piece.dtype} {tuple(piece.shape)}, the piece for rank 0 "
                f"is {first.dtype} {tuple(first.shape)}; pad the pieces to one shape"
            )
    if world == 1:
        return Exchange.of([first.detach()])
    if not agreed:
        _require_agreement("all_to_all", first, group)
    payload = torch.cat([as_bytes(piece) for piece in pieces])
    if payload.numel() == 0:
        return Exchange.of([torch.empty_like(first) for _ in range(world)])
    received = torch.empty_like(payload)
    work = dist.all_to_all_single(received, payload, group=group, async_op=True)
    accounting.bytes_sent(payload.numel() // world * (world - 1), "all_to_all")
    return Exchange(
        work, (payload, received), lambda: [_from_bytes(piece, first) for piece in received.chunk(world)]
    )


def all_to_all(
    pieces: Sequence[Tensor], group: dist.ProcessGroup | None, *, agreed: bool = False
) -> list[Tensor]:
    """Send `pieces[r]` to rank r and return what every rank sent here.

    Args:
        pieces: one tensor a rank, all of one shape and dtype, the same on all ranks of the group.
        group: the process group, or None for a group of one.
        agreed: the ranks have agreed on what this is a part of.

    Returns:
        One tensor a rank, in rank order: entry r is what rank r had at this rank's index.

    Raises:
        ValueError: the number of pieces is not the size of the group, or their shapes or dtypes differ.
        DisagreementError, MissingRankError, CaptureError: see `agreement.require_agreement`.
    """
    return start_all_to_all(pieces, group, agreed=agreed).wait()


def as_bytes(x: Tensor) -> Tensor:
    """The elements of `x` in row-major order as [bytes] uint8: a view where they lie like that, else a copy."""
    # A negation or conjugation that torch has only noted would stay behind.
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    # Of one element any stride is contiguous; bytes need a stride of 1.
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _from_bytes(payload: Tensor, like: Tensor) -> Tensor:
    return payload.view(like.dtype).view(like.shape)
