"""Where this rank's tokens and lanes lie: the groups and the layout that every deterministic module reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives.transport import group_rank, group_size
from te_overrides.kernels.gemm.reference import lanes_per_rank
from te_overrides.kernels.zigzag.reference import length_multiple, to_canonical

CP_LAYOUT = "zigzag"
"""Megatron cuts a sequence over CP ranks in zigzag chunks (megatron.core.utils.get_batch_on_this_cp_rank)."""


class LayoutMismatchError(RuntimeError):
    """Process groups and configuration tell different stories."""


@dataclass(frozen=True)
class ParallelLayout:
    """Groups of one model, and how tokens lie in them. A group of None is a group of one rank.

    Attributes:
        cu_seqlens: where the sequences of a packed batch begin and end on the token axis of all context-parallel
            ranks, padding included (`megatron_plugins/packed_order.py`); None where every batch row is one sequence.
    """

    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    cp_layout: str = CP_LAYOUT
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def tp_size(self) -> int:
        return group_size(self.tp_group)

    @property
    def tp_rank(self) -> int:
        return group_rank(self.tp_group)

    @property
    def cp_size(self) -> int:
        return group_size(self.cp_group)

    @property
    def cp_rank(self) -> int:
        return group_rank(self.cp_group)

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """The group over which the tokens of a context-parallel rank are split further, or None."""
        return self.tp_group if self.sequence_parallel else None

    def canonical(self, parts: Sequence[torch.Tensor], positions: int = 1) -> torch.Tensor:
        """What the context-parallel ranks hold, in the order of positions along dim 0.

        Args:
            parts: one tensor a rank, in rank order.
            positions: how many consecutive positions an entry stands for.
        """
        bounds = None if self.cu_seqlens is None else tuple(bound // positions for bound in self.cu_seqlens)
        return to_canonical(parts, self.cp_layout, cu_seqlens=bounds)

    def chunks(self, positions: int) -> set[int]:
        """Lengths of the runs of consecutive positions that a context-parallel rank holds of `positions` in all."""
        whole = positions * self.cp_size
        bounds = (0, whole) if self.cu_seqlens is None else self.cu_seqlens
        multiple = length_multiple(self.cp_size, self.cp_layout)
        return {(stop - start) // multiple for start, stop in itertools.pairwise(bounds)}


def _or_none(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and dist.get_world_size(group) > 1 else None


def layout_of(config: Any, tp_group: dist.ProcessGroup | None = None, cp_group: Any = None) -> ParallelLayout:
    """The layout of a module built with `config`.

    Args:
        config: Megatron's TransformerConfig or ModelParallelConfig.
        tp_group: the group the builder was given; None takes parallel_state's.
        cp_group: the context-parallel group, where the builder knows it; None takes parallel_state's.

    Raises:
        LayoutMismatchError: a group whose size is not the configured one.
        LaneError: a TP degree that does not divide the lanes.
    """
    from megatron.core import parallel_state

    distributed = dist.is_available() and dist.is_initialized()
    if tp_group is None and distributed:
        tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if cp_group is None and distributed:
        cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
    layout = ParallelLayout(
        tp_group=_or_none(tp_group),
        cp_group=_or_none(cp_group),
        sequence_parallel=bool(config.sequence_parallel) and _or_none(tp_group) is not None,
    )
    for name, configured, found in (
        ("tensor_model_parallel_size", config.tensor_model_parallel_size, layout.tp_size),
        ("context_parallel_size", config.context_parallel_size, layout.cp_size),
    ):
        if configured != found:
            raise LayoutMismatchError(
                f"config.{name} is {configured}, but the process group handed to the module has {found} ranks. "
                f"Initialize megatron.core.parallel_state with the same {name} before building the model."
            )
    lanes_per_rank(layout.tp_size)
    return layout


def canonical_tokens(x: torch.Tensor) -> torch.Tensor:
    """[S, B, C] in position order to [B * S, C] in canonical token order: sequence first, then position."""
    return x.transpose(0, 1).flatten(0, 1)
