"""The ranks of verify ffn with an order of the block broken on purpose: the command must find that.

Under sequence parallelism the roundings of the lanes are left out; elsewhere the tokens of a weight gradient come in
the order of ranks, not of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_plugins.modules import input_gradient, linear
from megatron_plugins.parallel_layout import ParallelLayout
from megatron_plugins.verify.ffn import rank as unbroken
from megatron_plugins.verify.ffn.plan import Case
from te_overrides.kernels.gemm import reference

environment, run_baseline, run_work = unbroken.environment, unbroken.run_baseline, unbroken.run_work


def _unrounded(a: torch.Tensor, b: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """The tree over lanes that are not rounded."""
    return reference.lane_tree(a, b, dtype=torch.float32, **arguments).to(a.dtype)


def _by_rank(layout: ParallelLayout, parts: Any, positions: int = 1) -> torch.Tensor:
    """Tokens as their ranks hold them."""
    return torch.cat(list(parts), dim=0)


@contextmanager
def _broken(faults: tuple[tuple[Any, str, Any], ...]) -> Iterator[None]:
    kept = [getattr(owner, name) for owner, name, _ in faults]
    for owner, name, fault in faults:
        setattr(owner, name, fault)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(faults, kept, strict=True):
            setattr(owner, name, original)


TREES = tuple((module, "lane_tree", _unrounded) for module in (input_gradient, linear))
TOKENS = ((ParallelLayout, "canonical", _by_rank),)


def run_case(rank: int, world: int, case: Case, *arguments: Any) -> Any:
    """`run_case` with one of the faults."""
    with _broken(TREES if case.mesh.sp else TOKENS):
        return unbroken.run_case(rank, world, case, *arguments)
