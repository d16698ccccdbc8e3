"""Residual add with bias: one rounding for the bias, one for the residual, in that order.

Megatron's fused form compiles both adds and rounds once; its unfused form rounds twice. The layer spec names this
function, so ``bias_dropout_fusion`` cannot change bits. Dropout is refused when modules are built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_plugins.modules.linear import BiasAdd
from megatron_plugins.parallel_layout import ParallelLayout
from patches.errors import NotCoveredError
from te_overrides.kernels.eager import eager_only

BiasDropoutAdd = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


@eager_only
def _bias_dropout_add(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    x, bias = x_with_bias
    if prob:
        raise NotCoveredError(f"dropout probability {prob} reached the residual add; set --hidden-dropout 0.")
    if bias is not None:
        layout: ParallelLayout | None = getattr(bias, "deterministic_layout", None)
        if layout is None:
            raise NotCoveredError(
                "a bias without a layout reached the residual add: it does not come from a deterministic row-parallel "
                "linear, so the order of its gradient is unknown. Use the deterministic layer spec for the whole layer."
            )
        x = BiasAdd.apply(x, bias, layout, layout.sequence_parallel)
    return torch.add(residual, x)


def get_deterministic_bias_dropout_add(training: bool, fused: bool, **_: Any) -> BiasDropoutAdd:
    """Drop-in for ``megatron.core.fusions.fused_bias_dropout.get_bias_dropout_add``; both arguments change nothing."""
    return _bias_dropout_add
