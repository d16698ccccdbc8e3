"""The ranks of verify ffn with a rounding of the block left out on purpose: the command must find that."""

from __future__ import annotations

from typing import Any

import torch

from megatron_plugins.modules import input_gradient, linear
from megatron_plugins.verify.ffn import rank as unbroken
from te_overrides.kernels.gemm import reference

environment, run_baseline, run_work = unbroken.environment, unbroken.run_baseline, unbroken.run_work


def _unrounded(a: torch.Tensor, b: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """The tree over lanes that are not rounded."""
    return reference.lane_tree(a, b, dtype=torch.float32, **arguments).to(a.dtype)


def run_case(*arguments: Any) -> Any:
    """`run_case` with such trees."""
    modules: tuple[Any, ...] = (
        input_gradient,
        linear,
    )
    kept = [module.lane_tree for module in modules]
    for module in modules:
        module.lane_tree = _unrounded
    try:
        return unbroken.run_case(*arguments)
    finally:
        for module, function in zip(modules, kept, strict=True):
            module.lane_tree = function
