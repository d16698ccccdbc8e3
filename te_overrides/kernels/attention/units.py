"""Attention cut into units that nothing divides: one key head of one batch row, over its whole sequence.

A library's kernel may order its sums by anything that a launch shows it: rows, heads, batch. If every launch is one
unit, and a unit is the same at every degree, that order cannot matter. So context-parallel ranks do not share a unit's
rows: they exchange rows for heads (all-to-all), each computes whole units, and the results travel back. Units lie on
ranks as evenly as their number allows; work adds up to that of one rank, nothing is computed twice.

Layouts enter through `te_overrides/kernels/zigzag` alone: both are put into the order of positions before a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from te_overrides.kernels.collectives.reference import even_cuts
from te_overrides.kernels.collectives.transport import all_to_all, group_rank, group_size
from te_overrides.kernels.zigzag.reference import from_canonical, to_canonical


@dataclass(frozen=True)
class Units:
    """The units of a batch and who computes them.

    Attributes:
        batch, groups: batch rows and key heads; unit `row * groups + group`.
        cp_group: ranks that share the sequence; None is one rank.
        layout: how rows lie over them.
    """

    batch: int
    groups: int
    cp_group: dist.ProcessGroup | None
    layout: str

    @property
    def cuts(self) -> list[slice]:
        """Of each rank, the units that it computes."""
        return even_cuts(self.batch * self.groups, group_size(self.cp_group))

    @property
    def _most(self) -> int:
        return max(cut.stop - cut.start for cut in self.cuts)

    def whole(self, x: Tensor) -> Tensor:
        """From rows to units.

        Args:
            x: [s_local, b, h, d], this rank's rows; `groups` divides h.

        Returns:
            [units of this rank, s, h / groups, d], rows in the order of positions.
        """
        rows, batch, heads, d = x.shape
        units = x.view(rows, batch, self.groups, heads // self.groups, d).permute(1, 2, 0, 3, 4).flatten(0, 1)
        own = self.cuts[group_rank(self.cp_group)]
        # A transport moves equal pieces: short ones travel with units of zeros that the receiver drops.
        arrived = all_to_all([self._filled(units[cut]) for cut in self.cuts], self.cp_group)
        return to_canonical([piece[: own.stop - own.start] for piece in arrived], self.layout, 1)

    def held(self, x: Tensor) -> Tensor:
        """From units to rows: the inverse of `whole`.

        Args:
            x: [units of this rank, s, heads of a unit, d].

        Returns:
            [s_local, b, groups * heads of a unit, d], contiguous.
        """
        ranks = group_size(self.cp_group)
        sent = [self._filled(from_canonical(x, ranks, rank, self.layout, 1)) for rank in range(ranks)]
        arrived = all_to_all(sent, self.cp_group)
        parts = [piece[: cut.stop - cut.start] for piece, cut in zip(arrived, self.cuts, strict=True)]
        rows, per_group, d = parts[0].shape[1:]
        whole = x.new_empty(rows, self.batch, self.groups, per_group, d)
        by_unit = whole.permute(1, 2, 0, 3, 4)
        for part, cut in zip(parts, self.cuts, strict=True):
            for index, unit in enumerate(range(cut.start, cut.stop)):
                by_unit[unit // self.groups, unit % self.groups] = part[index]
        return whole.flatten(2, 3)

    def _filled(self, units: Tensor) -> Tensor:
        short = self._most - units.shape[0]
        return (pad(units, (0, 0) * (units.dim() - 1) + (0, short)) if short else units).contiguous()
