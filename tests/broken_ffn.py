"""The ranks of verify ffn with a rounding of the block left out on purpose: the command must find that."""

from __future__ import annotations

from typing import Any

import torch

from megatron_plugins.modules import linear
from megatron_plugins.verify.ffn import rank as unbroken
from te_overrides.kernels.gemm import reference

environment, run_baseline, run_work = unbroken.environment, unbroken.run_baseline, unbroken.run_work


def _unrounded(a: torch.Tensor, b: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """The tree over lanes that are not rounded."""
    return reference.lane_tree(a, b, dtype=torch.float32, **arguments).to(a.dtype)


def run_case(*arguments: Any) -> Any:
    """`run_case` with such trees."""
    kept = linear.lane_tree
    linear.lane_tree = _unrounded
    try:
        return unbroken.run_case(*arguments)
    finally:
        linear.lane_tree = kept
