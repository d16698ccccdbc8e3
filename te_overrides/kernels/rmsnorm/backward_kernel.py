"""Gradients of the norm: dx a row, and the weight's summands as chains over granules of 16 positions.

A program holds some chains, one row of each at a time, and walks their rows in canonical order. The next rows are
loaded before the current ones are summed, so that memory does not wait for the tree. Rows too long for that, whose
operands and sums do not fit into the registers of a program together, take two kernels: `long_rows_kernel` for dx,
`partials_kernel` for the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.rmsnorm.forward_kernel import effective_weight
from te_overrides.kernels.rounding.kernel import stored
from te_overrides.kernels.tree.kernel import tree_of_rows


@triton.jit
def _row_of(step, granule, inners, HEADS: tl.constexpr, GRANULE: tl.constexpr):
    """Row of the granules' step; [C] int64. Rows lie as [positions, inners, HEADS], inner is the program's."""
    position = granule * GRANULE + step // HEADS
    return (position * inners + tl.program_id(1)) * HEADS + step % HEADS


@triton.jit
def _load(ptr, row, stride, column, mask):
    """[C, N] as stored; zeros outside."""
    return tl.load(ptr + (row * stride)[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def backward_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_residual_ptr, dx_ptr, partial_ptr,
    positions, inners, grad_stride, x_stride, grad_residual_stride,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, CHAINS: tl.constexpr, HEADS: tl.constexpr, GRANULE: tl.constexpr,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """grad, x [positions * inners * HEADS, COLUMNS] with row strides, rstd a row -> dx contiguous, partials.

    Programs: granules / CHAINS by inners (batch, or batch times KV groups). Partials [granules, inners, COLUMNS].
    With ADD the gradient of the residual stream is added to dx.
    """
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    STEPS: tl.constexpr = GRANULE * HEADS
    granule = tl.program_id(0).to(tl.int64) * CHAINS + tl.arange(0, CHAINS)  # [C]
    column = tl.arange(0, 2**LEVELS)  # [N]
    column_inside = (column < COLUMNS)[None, :]
    weight = effective_weight(weight_ptr, column, COLUMNS, COLUMNS == 2**LEVELS, ZERO_CENTERED)[None, :]
    sums = tl.zeros((CHAINS, 2**LEVELS), tl.float32)
    row = _row_of(0, granule, inners, HEADS, GRANULE)
    inside = granule * GRANULE < positions
    mask = inside[:, None] & column_inside
    grad = _load(grad_ptr, row, grad_stride, column, mask)
    x = _load(x_ptr, row, x_stride, column, mask)
    rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
    for step in range(STEPS):
        next_row = _row_of(step + 1, granule, inners, HEADS, GRANULE)
        next_inside = (granule * GRANULE + (step + 1) // HEADS < positions) & (step + 1 < STEPS)
        next_mask = next_inside[:, None] & column_inside
        next_grad = _load(grad_ptr, next_row, grad_stride, column, next_mask)
        next_x = _load(x_ptr, next_row, x_stride, column, next_mask)
        next_rstd = tl.load(rstd_ptr + next_row, mask=next_inside, other=0.0)
        weighted = grad.to(tl.float32) * weight
        normed = x.to(tl.float32) * rstd[:, None]
        products = weighted * normed
        if COLUMNS < 2**LEVELS:
            # -0 is the one number that changes no sum.
            products = tl.where(column_inside, products, -0.0)
        # The compiler may divide in float32, correctly rounded: that is the same number.
        mean = (tree_of_rows(products, LEVELS).to(tl.float64) / COLUMNS).to(tl.float32)
        dx = stored(rstd[:, None] * (weighted - normed * mean[:, None]), DTYPE, NATIVE)
        if ADD:
            stream = _load(grad_residual_ptr, row, grad_residual_stride, column, mask).to(tl.float32)
            dx = stored(dx.to(tl.float32) + stream, DTYPE, NATIVE)
        tl.store(dx_ptr + (row * COLUMNS)[:, None] + column[None, :], dx, mask=mask)
        added = sums + grad.to(tl.float32) * stored(normed, DTYPE, NATIVE).to(tl.float32)
        sums = tl.where(inside[:, None], added, sums)
        row, inside, mask, grad, x, rstd = next_row, next_inside, next_mask, next_grad, next_x, next_rstd
    chain = granule * inners + tl.program_id(1)
    exists = (granule * GRANULE < positions)[:, None] & column_inside
    tl.store(partial_ptr + (chain * COLUMNS)[:, None] + column[None, :], sums, mask=exists)


@triton.jit
def long_rows_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_residual_ptr, dx_ptr, grad_stride, x_stride, grad_residual_stride,
    COLUMNS: tl.constexpr, PIECE_LEVELS: tl.constexpr, MORE_LEVELS: tl.constexpr, ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """dx of a row, in 2^MORE_LEVELS pieces of 2^PIECE_LEVELS columns: subtrees of the row's tree."""
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    WHOLE: tl.constexpr = COLUMNS % 2**PIECE_LEVELS == 0
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    rstd = tl.load(rstd_ptr + row)[:, None]
    subtrees = tl.full((1, 2**MORE_LEVELS), -0.0, tl.float32)
    for piece in range(2**MORE_LEVELS):
        column = piece * 2**PIECE_LEVELS + tl.arange(0, 2**PIECE_LEVELS)
        inside = (column < COLUMNS)[None, :]
        grad = _load(grad_ptr, row, grad_stride, column, inside).to(tl.float32)
        x = _load(x_ptr, row, x_stride, column, inside).to(tl.float32)
        weighted = grad * effective_weight(weight_ptr, column, COLUMNS, WHOLE, ZERO_CENTERED)[None, :]
        # -0 is the one number that changes no sum.
        subtree = tree_of_rows(tl.where(inside, weighted * (x * rstd), -0.0), PIECE_LEVELS)[:, None]
        subtrees = tl.where(tl.arange(0, 2**MORE_LEVELS)[None, :] == piece, subtree, subtrees)
    total = tree_of_rows(subtrees, MORE_LEVELS).to(tl.float64)
    mean = (total / COLUMNS).to(tl.float32)[:, None]
    for piece in range(2**MORE_LEVELS):
        column = piece * 2**PIECE_LEVELS + tl.arange(0, 2**PIECE_LEVELS)
        inside = (column < COLUMNS)[None, :]
        grad = _load(grad_ptr, row, grad_stride, column, inside).to(tl.float32)
        x = _load(x_ptr, row, x_stride, column, inside).to(tl.float32)
        weighted = grad * effective_weight(weight_ptr, column, COLUMNS, WHOLE, ZERO_CENTERED)[None, :]
        dx = stored(rstd * (weighted - (x * rstd) * mean), DTYPE, NATIVE)
        if ADD:
            stream = _load(grad_residual_ptr, row, grad_residual_stride, column, inside).to(tl.float32)
            dx = stored(dx.to(tl.float32) + stream, DTYPE, NATIVE)
        tl.store(dx_ptr + (row * COLUMNS)[:, None] + column[None, :], dx, mask=inside)


@triton.jit
def partials_kernel(
    grad_ptr, x_ptr, rstd_ptr, partial_ptr, positions, inners, grad_stride, x_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """The partials alone: programs are granules by inners by blocks of columns."""
    granule = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column_inside = (column < COLUMNS)[None, :]
    sums = tl.zeros((1, BLOCK), tl.float32)
    for step in range(GRANULE):
        row = _row_of(step, granule, inners, 1, GRANULE)
        inside = granule * GRANULE + step < positions
        mask = inside[:, None] & column_inside
        grad = _load(grad_ptr, row, grad_stride, column, mask)
        x = _load(x_ptr, row, x_stride, column, mask)
        normed = x.to(tl.float32) * tl.load(rstd_ptr + row, mask=inside, other=0.0)[:, None]
        added = sums + grad.to(tl.float32) * stored(normed, x.dtype, NATIVE).to(tl.float32)
        sums = tl.where(inside[:, None], added, sums)
    chain = granule * inners + tl.program_id(1)
    tl.store(partial_ptr + (chain * COLUMNS)[:, None] + column[None, :], sums, mask=column_inside)
