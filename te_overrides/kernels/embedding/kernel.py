"""Lookup and `reference.py`'s gradient as Triton kernels: bytes move, and a row's chain belongs to one program.

Tokens are sorted by id, equal ids in their canonical order. The program of a run's first token adds the run; the others
have nothing to do. No host waits, no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.launching import Launch, Plans, device_of, options, row_stride, signature, with_rows
from te_overrides.kernels.rounding.kernel import rounded

BLOCK, THREADS = 1024, 128
AHEAD = 8
"""Rows of a chain that are loaded together; they are added one by one."""

_plans = Plans()


@triton.jit
def lookup_kernel(ids_ptr, weight_ptr, out_ptr, stride, first, rows, columns, BLOCK: tl.constexpr):
    """ids [T], weight [rows, columns] -> out [T, columns] contiguous; +0 for ids of other ranks and for -0."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids_ptr + token) - first
    here = (place >= 0) & (place < rows)
    value = tl.load(weight_ptr + place * stride + column, mask=column < tl.where(here, columns, 0), other=0.0)
    value = value.to(tl.float32)
    value = rounded(tl.where(value == 0.0, 0.0, value), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * columns + column, value, mask=column < columns)


@triton.jit
def gradient_kernel(
    ids_ptr, order_ptr, grad_ptr, out_ptr, stride, tokens, rows, columns,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """ids [T] sorted, order [T], grad [T, columns] -> out [rows, columns] float32, which holds zeros."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    own = tl.load(ids_ptr + at)
    before = tl.load(ids_ptr + at - 1, mask=at > 0, other=-1)
    if ((at == 0) | (own != before)) & (own >= 0) & (own < rows):
        total = tl.zeros((BLOCK,), tl.float32)
        more = at < tokens
        while more:
            for step in tl.static_range(AHEAD):
                # -1: nobody's, so no run goes on past the last token.
                here = tl.load(ids_ptr + at + step, mask=at + step < tokens, other=-1) == own
                token = tl.load(order_ptr + at + step, mask=here, other=0)
                term = tl.load(
                    grad_ptr + token * stride + column, mask=column < tl.where(here, columns, 0), other=0.0
                )
                total = tl.where(here, total + term.to(tl.float32), total)
                more = here
            at += AHEAD
        tl.store(out_ptr + own * columns + column, total, mask=inside)


def _lookup_plan(ids: torch.Tensor, weight: torch.Tensor, first: int) -> Launch:
    rows, columns = weight.shape
    grid = (ids.numel(), triton.cdiv(columns, BLOCK), 1)
    return Launch(
        lookup_kernel, grid, (row_stride(weight), first, rows, columns), {"BLOCK": BLOCK}, options(THREADS)
    )


def lookup(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """`reference.lookup` on a GPU."""
    ids, weight = ids.contiguous(), with_rows(weight)
    out = torch.empty(*ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if out.numel():
        key = ("lookup", weight.device, signature(ids), signature(weight), first)
        plan = _plans(key, _lookup_plan, ids, weight, first)
        with device_of(weight):
            plan(ids, weight, out)
    return out


def _gradient_plan(grad: torch.Tensor, rows: int) -> Launch:
    tokens, columns = grad.shape
    grid = (tokens, triton.cdiv(columns, BLOCK), 1)
    constants = {"BLOCK": BLOCK, "AHEAD": AHEAD}
    return Launch(
        gradient_kernel, grid, (row_stride(grad), tokens, rows, columns), constants, options(THREADS)
    )


def embedding_gradient(ids: torch.Tensor, grad: torch.Tensor, rows: int) -> torch.Tensor:
    """`reference.embedding_gradient` on a GPU."""
    grad = with_rows(grad)
    out = torch.zeros(rows, grad.shape[1], dtype=torch.float32, device=grad.device)
    if grad.numel():
        ids, order = torch.sort(ids, stable=True)
        plan = _plans(("gradient", grad.device, signature(grad), rows), _gradient_plan, grad, rows)
        with device_of(grad):
            plan(ids, order, grad, out)
    return out
