"""Embedding lookup and gradient: the reference on a CPU, kernels of the same bits on a GPU."""

from __future__ import annotations

from types import ModuleType

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.embedding import reference


def _implementation(x: torch.Tensor) -> ModuleType:
    if not x.is_cuda:
        return reference
    from te_overrides.kernels.embedding import kernel

    return kernel


@eager_only
def lookup(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Rows of a rank's part of the table; see `reference.lookup`."""
    out: torch.Tensor = _implementation(weight).lookup(ids, weight, first)
    return out


@eager_only
def embedding_gradient(ids: torch.Tensor, grad: torch.Tensor, rows: int) -> torch.Tensor:
    """Gradient of a rank's part of the table, [rows, C] float32; see `reference.embedding_gradient`."""
    out: torch.Tensor = _implementation(grad).embedding_gradient(ids, grad, rows)
    return out
