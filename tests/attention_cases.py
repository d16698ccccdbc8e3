"""Operands for attention tests, and every result of one attention call under one name each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention

RESULTS = ("out", "lse", "dQ", "dK", "dV")


def operands(
    seq: int,
    batch: int,
    heads: int,
    groups: int,
    d: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    d_v: int | None = None,
) -> list[Tensor]:
    """query, key, value, grad_out: [seq, batch, heads or groups, d or d_v], standard normal."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, d), (groups, d), (groups, d_v or d), (heads, d_v or d)]
    return [torch.randn(seq, batch, *shape, generator=generator).to(dtype) for shape in shapes]


def everything(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **options: Any
) -> dict[str, Tensor]:
    """out, lse, dQ, dK, dV of `context_parallel_attention(..., **options)`, through autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (query, key, value))
    out, lse = context_parallel_attention(q, k, v, **options)
    out.backward(grad_out)
    return dict(zip(RESULTS, (out.detach(), lse, q.grad, k.grad, v.grad), strict=True))


def rows_of(results: dict[str, Tensor], rows: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """The results restricted to some rows of the sequence."""
    rows = torch.as_tensor(rows)
    return {name: x[..., rows] if name == "lse" else x[rows] for name, x in results.items()}


def packed_everything(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **options: Any
) -> dict[str, Tensor]:
    """out, lse, dQ, dK, dV of `packed_attention(..., **options)`; operands [t, h, d], lse [h, t]."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (query, key, value))
    out, lse = packed_attention(q, k, v, **options)
    out.backward(grad_out)
    return dict(zip(RESULTS, (out.detach(), lse, q.grad, k.grad, v.grad), strict=True))
