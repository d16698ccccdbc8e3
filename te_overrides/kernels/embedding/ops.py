"""Embedding lookup and gradient: the reference on a CPU, kernels of the same bits on a GPU."""

from __future__ import annotations

from types import ModuleType

import torch

from te_overrides.kernels.devices import on_gpu
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.embedding import reference


def _implementation(**operands: torch.Tensor) -> ModuleType:
    if not on_gpu("embedding", **operands):
        return reference
    from te_overrides.kernels.embedding import kernel

    return kernel


def _widened(ids: torch.Tensor) -> torch.Tensor:
    """Ids as int64, in which a row's address cannot overflow."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"embedding: ids are {ids.dtype}; they must be integers, int64 as a rule")
    return ids.to(torch.int64)


@eager_only
def lookup(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Rows of a rank's part of the table; see `reference.lookup`. Ids of any integer dtype are widened to int64."""
    ids = _widened(ids)
    out: torch.Tensor = _implementation(weight=weight, ids=ids).lookup(ids, weight, first)
    return out


@eager_only
def embedding_gradient(ids: torch.Tensor, grad: torch.Tensor, rows: int) -> torch.Tensor:
    """Gradient of a rank's part of the table, [rows, C] float32; see `reference.embedding_gradient`.

    Raises:
        DeviceError: operands on several devices.
        ValueError: ids that are no integers, or not one a row of `grad`.
    """
    ids = _widened(ids)
    if grad.dim() != 2 or ids.shape != grad.shape[:1]:
        raise ValueError(
            f"embedding: ids are {tuple(ids.shape)}, grad {tuple(grad.shape)}; one id a row is needed"
        )
    out: torch.Tensor = _implementation(grad=grad, ids=ids).embedding_gradient(ids, grad, rows)
    return out
