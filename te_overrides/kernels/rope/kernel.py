"""`reference.py` as Triton kernels: tables of cosine and sine, and the rotation of pairs by them.

The tables are worked out once for the angles of a forward pass, in float64 as the contract asks; every layer reads
them. The rotation is elementwise with its three roundings, so the launch cannot matter to a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.launching import (
    Launch,
    Plans,
    device_of,
    options,
    rounds_natively,
    row_stride,
    signature,
    with_rows,
)
from te_overrides.kernels.portable_math.kernel import cos, sin
from te_overrides.kernels.rounding.kernel import stored

TABLE_BLOCK, TABLE_THREADS = 512, 128
PAIRS, THREADS = 2048, 128
"""Pairs of a program, and its threads."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_plans = Plans()


class RopeCoverageError(ValueError):
    """The reference covers it, the kernel does not."""


@triton.jit
def table_kernel(
    angles_ptr, cos_ptr, sin_ptr, elements, MSCALE: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """angles float32 -> cosine and sine, times MSCALE, each rounded to float32 and to the tables' dtype."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    angle = tl.load(angles_ptr + at, mask=inside, other=0.0)
    tl.store(cos_ptr + at, stored(cos(angle) * MSCALE, cos_ptr.dtype.element_ty, NATIVE), mask=inside)
    tl.store(sin_ptr + at, stored(sin(angle) * MSCALE, sin_ptr.dtype.element_ty, NATIVE), mask=inside)


@triton.jit
def _product(x, table, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Rounded to the activation dtype, in float32."""
    return stored(x * table, DTYPE, NATIVE).to(tl.float32)


@triton.jit
def rotate_kernel(
    t_ptr, cos_ptr, sin_ptr, out_ptr, rows, rows_of_a_position, t_stride, columns,
    ROTATED: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSE: tl.constexpr, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """t [rows, columns] with a row stride, tables [positions, ROTATED] -> out [rows, columns] contiguous.

    WIDTH: a power of two that holds ROTATED / 2 pairs; REST: one that holds the columns behind them, or 0.
    TRANSPOSE turns the other way: the gradient.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [R]
    pair = tl.arange(0, WIDTH)  # [W]
    first, second = pair, pair + ROTATED // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    mask = (row < rows)[:, None] & (pair < ROTATED // 2)[None, :]
    read, written = (row.to(tl.int64) * t_stride)[:, None], (row.to(tl.int64) * columns)[:, None]
    # Divided in 32 bits: a division of 64 bits costs more than the rotation.
    table = ((row // rows_of_a_position).to(tl.int64) * ROTATED)[:, None]
    x1 = tl.load(t_ptr + read + first[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(t_ptr + read + second[None, :], mask=mask, other=0.0).to(tl.float32)
    c1 = tl.load(cos_ptr + table + first[None, :], mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos_ptr + table + second[None, :], mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + table + first[None, :], mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin_ptr + table + second[None, :], mask=mask, other=0.0).to(tl.float32)
    # The reference adds a negated product: a + -b is a - b, and rounding keeps the sign apart.
    if TRANSPOSE:
        y1 = _product(x1, c1, DTYPE, NATIVE) + _product(x2, s2, DTYPE, NATIVE)
        y2 = _product(x2, c2, DTYPE, NATIVE) - _product(x1, s1, DTYPE, NATIVE)
    else:
        y1 = _product(x1, c1, DTYPE, NATIVE) - _product(x2, s1, DTYPE, NATIVE)
        y2 = _product(x2, c2, DTYPE, NATIVE) + _product(x1, s2, DTYPE, NATIVE)
    tl.store(out_ptr + written + first[None, :], stored(y1, DTYPE, NATIVE), mask=mask)
    tl.store(out_ptr + written + second[None, :], stored(y2, DTYPE, NATIVE), mask=mask)
    if REST > 0:
        column = ROTATED + tl.arange(0, REST)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        kept = tl.load(t_ptr + read + column[None, :], mask=mask)
        tl.store(out_ptr + written + column[None, :], kept, mask=mask)


def tables(freqs: torch.Tensor, dtype: torch.dtype, mscale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosine, sine) of the angles `freqs`, any shape, radians; contiguous, in `dtype`."""
    freqs = freqs.to(torch.float32).contiguous()
    c, s = (torch.empty(freqs.shape, dtype=dtype, device=freqs.device) for _ in range(2))
    if c.numel():
        key = ("tables", freqs.device, signature(freqs), dtype, mscale)
        with device_of(freqs):
            _plans(key, _plan_tables, freqs.numel(), mscale)(freqs, c, s)
    return c, s


def _plan_tables(elements: int, mscale: float) -> Launch:
    return Launch(
        table_kernel,
        (triton.cdiv(elements, TABLE_BLOCK), 1, 1),
        (elements,),
        {"MSCALE": float(mscale), "BLOCK": TABLE_BLOCK, "NATIVE": rounds_natively(table_kernel)},
        options(TABLE_THREADS),
    )


def rotate(
    t: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool, transpose: bool = False
) -> torch.Tensor:
    """`t` [s, ..., d] turned by tables [s, 1, ..., 1, r] as `tables` leaves them.

    Raises:
        RopeCoverageError: a dtype that the kernel does not cover, tables that differ within a position, or an odd or
            too large number of rotated channels.
    """
    rotated, columns = c.shape[-1], t.shape[-1]
    if t.dtype not in DTYPES or c.dtype != t.dtype:
        raise RopeCoverageError(
            f"RoPE: activations are {t.dtype}, tables {c.dtype}; the kernel takes {DTYPES}"
        )
    if c.numel() != t.shape[0] * rotated or rotated % 2 or rotated > columns:
        raise RopeCoverageError(
            f"RoPE: activations {tuple(t.shape)}, angles {tuple(c.shape)}; the kernel takes one row of angles for each "
            "position (dim 0), an even number of them, no more than channels. Expand nothing, or run on a CPU."
        )
    t = with_rows(t)
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    if out.numel():
        key = ("rotate", t.device, signature(t), signature(c), signature(s), interleaved, transpose)
        with device_of(t):
            _plans(key, _plan_rotate, t, rotated, interleaved, transpose)(t, c, s, out)
    return out


def _plan_rotate(t: torch.Tensor, rotated: int, interleaved: bool, transpose: bool) -> Launch:
    columns = t.shape[-1]
    rows, width = t.numel() // columns, triton.next_power_of_2(rotated // 2)
    rest = triton.next_power_of_2(columns - rotated) if columns > rotated else 0
    per_program = max(1, PAIRS // width)
    constants = {
        "ROTATED": rotated, "WIDTH": width, "REST": rest, "ROWS": per_program, "INTERLEAVED": interleaved,
        "TRANSPOSE": transpose, "NATIVE": rounds_natively(rotate_kernel),
    }  # fmt: skip
    return Launch(
        rotate_kernel,
        (triton.cdiv(rows, per_program), 1, 1),
        (rows, rows // t.shape[0], row_stride(t), columns),
        constants,
        options(THREADS),
    )
