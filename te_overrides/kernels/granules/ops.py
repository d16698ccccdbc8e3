"""Sums over tokens: the reference on a CPU, kernels of the same bits on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from te_overrides.kernels.devices import on_gpu
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.granules import reference


def _implementation(x: torch.Tensor) -> Any:
    if not on_gpu("sums over tokens", x=x):
        return reference
    from te_overrides.kernels.granules import kernel

    return kernel


@eager_only
def granule_partials(terms: torch.Tensor) -> torch.Tensor:
    """Chains inside granules: [S, B, C] float32, or 16 bits, which are widened -> [ceil(S / 16), B, C] float32."""
    out: torch.Tensor = _implementation(terms).granule_partials(terms)
    return out


@eager_only
def sum_granules(partials: torch.Tensor) -> torch.Tensor:
    """The tree over all granules in canonical order: [granules, B, *groups, C] float32 -> [C]."""
    out: torch.Tensor = _implementation(partials).sum_granules(partials)
    return out
