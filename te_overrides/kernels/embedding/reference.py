"""Embedding lookup, and its gradient without atomics (docs/numbers.md, "Tokens").

A row of the gradient is the float32 chain of the output gradients of the tokens that used it, in canonical token
order, rounded once to the weight's dtype.
"""

from __future__ import annotations

import torch

from te_overrides.kernels.eager import eager_only


@eager_only
def lookup(
    ids: torch.Tensor,  # [...] int64, of the whole vocabulary
    weight: torch.Tensor,  # [rows, C], the rank's part, whose first row has the id `first`
    first: int,
) -> torch.Tensor:  # [..., C] in the weight's dtype
    """Rows of the table; +0 for ids of other ranks, so that the sum over ranks is exact. -0 becomes +0 everywhere."""
    place = ids - first
    here = (place >= 0) & (place < weight.shape[0])
    rows = weight[place.clamp(0, weight.shape[0] - 1)]
    # One rank contributes a row, the others +0; `+ 0.0` gives the one-rank case the same zero.
    return torch.add(torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows)), 0.0)


@eager_only
def embedding_gradient(
    ids: torch.Tensor,  # [T] int64, canonical order
    grad: torch.Tensor,  # [T, C]
    rows: int,
) -> torch.Tensor:  # [rows, C] float32
    """Gradient of a table of `rows` rows. Ids outside ``[0, rows)`` belong to another rank and are left out."""
    out = torch.zeros(rows, grad.shape[1], dtype=torch.float32, device=grad.device)
    mine = torch.nonzero((ids >= 0) & (ids < rows)).squeeze(1)
    if not mine.numel():
        return out
    ids, order = torch.sort(ids[mine], stable=True)
    terms = grad[mine][order].to(torch.float32)
    # How many earlier tokens carry the same id: pass r adds every id's r-th token, one per row.
    first = torch.cat([torch.ones_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])
    starts = torch.nonzero(first).squeeze(1)
    occurrence = torch.arange(ids.numel(), device=ids.device) - starts[torch.cumsum(first, 0) - 1]
    for r in range(int(occurrence.max()) + 1):
        now = occurrence == r
        out[ids[now]] = torch.add(out[ids[now]], terms[now])
    return out
