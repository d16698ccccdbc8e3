"""Operands on their way from all context-parallel ranks, and how many heads travel at a time.

One exchange carries all operands of a pass as bytes. It is started before the pass in front of it computes, so that
bytes move while a rank works. Heads never meet in attention, so a pass may take the key heads ("groups") in shares:
gather and compute the first, while the second moves. How many shares there are bounds what is held at a time and
cannot reach a bit.

What a rank holds beyond its own rows and results, in units of what one share brings (`Traffic`):

    one share           received bytes and the same rows in the order of positions          2
    more                the same, and the share behind it, which is under way               3
    each of them        a copy of this rank's part, which was sent                          1 / ranks
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from te_overrides.kernels.attention.ranks import Ranks, levels_of
from te_overrides.kernels.attention.reference import AttentionError
from te_overrides.kernels.collectives.reference import even_cuts
from te_overrides.kernels.collectives.transport import Exchange, start_all_gather

BOUND_VARIABLE = "DETERMINISTIC_ROCM_ATTENTION_GATHER_MIB"
"""MiB that gathered operands of attention may take on a rank; it must say the same on every rank."""
DEFAULT_BOUND = 4 << 30
OVERLAP = 8 << 20
"""From so many bytes on, two shares hide half of a gather behind the other half's work. A smaller one is over sooner
than a second launch pays."""


def bound_from_environment() -> int:
    """Bytes that gathered operands may take: the variable, or 4 GiB.

    Raises:
        AttentionError: a value that is no positive number.
    """
    value = os.environ.get(BOUND_VARIABLE)
    if value is None:
        return DEFAULT_BOUND
    if not value.isdecimal() or int(value) < 1:
        raise AttentionError(
            f"{BOUND_VARIABLE}={value!r}: give a whole number of MiB, 1 or more, or unset it"
        )
    return int(value) << 20


@dataclass(frozen=True)
class Traffic:
    """Bytes that one key head brings to a rank, all ranks' rows together.

    Attributes:
        passes: bytes of each exchange of a share, in the order in which they are started: K and V; in backward also Q,
            dO and the statistics of the group's query heads.
        ranks: context-parallel degree.
    """

    passes: tuple[int, ...]
    ranks: int

    def peak(self, groups: int, shares: int) -> int:
        """Most bytes held at a time when `groups` key heads come in `shares`."""
        if self.ranks == 1:
            return 0
        width = -(-groups // shares)
        most = 0
        for index, now in enumerate(self.passes):
            last = index + 1 == len(self.passes)
            behind = self.passes[(index + 1) % len(self.passes)] if shares > 1 or not last else 0
            # While a share is put in order it is held twice; what was sent is a copy of this rank's part.
            most = max(most, 2 * now + behind + (now + behind) // self.ranks)
        return width * most

    def shares(self, groups: int, bound: int, overlap: bool) -> int:
        """The fewest shares whose peak keeps to `bound`; one key head at a time where nothing does.

        Args:
            overlap: take two where there is enough to hide.
        """
        fewest = (
            2 if overlap and groups > 1 and self.ranks > 1 and groups * sum(self.passes) >= OVERLAP else 1
        )
        return next((n for n in range(fewest, groups) if self.peak(groups, n) <= bound), groups)


def shares_of(groups: int, shares: int) -> list[slice]:
    """Which key heads come together."""
    return even_cuts(groups, shares)


class Moving:
    """Operands under way. `take` waits for them, once, and lets go of what they arrived in."""

    def __init__(self, operands: Sequence[Tensor], ranks: Ranks) -> None:
        self._forms = [(x.shape, x.dtype) for x in operands]
        self._levels = levels_of(ranks)
        self._exchange: Exchange | None = None
        self._own = [x.detach() for x in operands] if not self._levels else None
        if self._levels:
            # The outer level moves what the inner one brought, so only the first can be under way from here on.
            self._exchange = start_all_gather(_payload(operands), self._levels[0])

    def take(self) -> list[list[Tensor]]:
        """Of each operand, one tensor a rank, in rank order."""
        if self._own is not None:
            return [[x] for x in self._own]
        if self._exchange is None:
            raise RuntimeError("these operands were taken already")
        pieces, self._exchange = self._exchange.wait(), None
        for group in self._levels[1:]:
            outer = start_all_gather(torch.stack(pieces), group).wait()
            pieces = [piece for part in outer for piece in part.unbind()]
        widths = [dtype.itemsize * shape.numel() for shape, dtype in self._forms]
        taken: list[list[Tensor]] = [[] for _ in widths]
        for piece in pieces:
            parts = piece[: sum(widths)].split(widths)
            for into, part, (shape, dtype) in zip(taken, parts, self._forms, strict=True):
                into.append(part.view(dtype).view(shape))
        return taken


def _payload(operands: Sequence[Tensor]) -> Tensor:
    """Their bytes one behind the other, float32 ones first in callers, filled up to a multiple of 16."""
    parts = [x.detach().reshape(-1).contiguous().view(torch.uint8) for x in operands]
    short = -sum(part.numel() for part in parts) % 16
    if short:
        parts.append(parts[0].new_zeros(short))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def one_ahead(starts: Iterable[Callable[[], Moving]]) -> Iterator[Moving]:
    """Each exchange, started before the caller gets the one in front of it."""
    front: Moving | None = None
    for start in starts:
        behind = start()
        if front is not None:
            yield front
        front = behind
    if front is not None:
        yield front
