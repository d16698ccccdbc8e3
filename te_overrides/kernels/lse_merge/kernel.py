"""`reference.py` as two Triton kernels: one for the LSE alone, one for outputs, which can merge the LSE as it goes.

Both are bound by memory for the output and by float64 arithmetic for the LSE alone; nothing in them depends on how many
elements a program or a thread has, so the launch table below is a matter of speed only. There is no autotuning: one
launch per form, the same in every process.

A row of the output, (batch, position, head) in the order of its dimensions, belongs to one program with all its
columns. That program is also the only one that reads and writes the row's LSE, which is what allows merging in place.

Every function takes what the reference takes and raises what it raises. Use `ops.py`, which picks between the two.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from te_overrides.kernels.lse_merge import reference
from te_overrides.kernels.portable_math.kernel import exp_f64, log1p_of_unit_f64
from te_overrides.kernels.rounding.kernel import to_bfloat16

# The launch table. The merge alone: elements of a program, threads. Outputs: rows of a program, which are its threads,
# and columns taken at a time.
MERGE_BLOCK, MERGE_THREADS = 512, 128
OUT_ROWS, OUT_COLUMNS = 64, 128

SCALE, ADD, RESCALE, MERGE = 0, 1, 2, 3
"""Forms of the output kernel: out = w step; out += w step; out = w' out + w step; the same with the LSE merged."""

_INF = tl.constexpr(float("inf"))
_SCALE, _ADD, _MERGE = tl.constexpr(SCALE), tl.constexpr(ADD), tl.constexpr(MERGE)


def merge_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """`reference.merge_lse_` on a GPU."""
    reference.require_mergeable(softmax_lse, softmax_lse_per_step)
    if softmax_lse.numel() == 0:
        return
    lse, step = _three_dimensions(softmax_lse), _three_dimensions(softmax_lse_per_step)
    if lse is None or step is None:
        # Neither layout can be walked in three strides: take the long way through contiguous copies.
        copy = softmax_lse.contiguous()
        merge_lse_(copy.view(1, 1, -1), softmax_lse_per_step.contiguous().view(1, 1, -1))
        softmax_lse.copy_(copy)
        return
    first, second, length = lse.shape
    blocks = triton.cdiv(length, MERGE_BLOCK)
    with torch.cuda.device_of(softmax_lse):
        _merge_kernel[(first * second * blocks,)](
            lse, step, *lse.stride(), *step.stride(), second, length, blocks,
            BLOCK=MERGE_BLOCK, num_warps=MERGE_THREADS // threads_of_a_warp(), num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def merge_second_half_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """`reference.merge_second_half_lse_` on a GPU."""
    merge_lse_(softmax_lse[..., 1, :], softmax_lse_per_step)


def out_correction_init(
    out_init_step: torch.Tensor, softmax_lse: torch.Tensor, softmax_lse_init_step: torch.Tensor, seq_dim: int
) -> torch.Tensor:
    """`reference.out_correction_init` on a GPU."""
    out = torch.empty_like(out_init_step)
    _correct(SCALE, out, out_init_step, softmax_lse, softmax_lse, softmax_lse_init_step, seq_dim)
    return out


def out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """`reference.out_correction_` on a GPU."""
    _correct(ADD, out, out_per_step, softmax_lse, softmax_lse, softmax_lse_per_step, seq_dim)


def second_half_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """`reference.second_half_out_correction_` on a GPU."""
    second_half = reference.second_half(softmax_lse)
    out_correction_(out.select(seq_dim, 1), out_per_step, second_half, softmax_lse_per_step, seq_dim)


def incremental_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_softmax_lse: torch.Tensor,
    new_softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """`reference.incremental_out_correction_` on a GPU."""
    _correct(RESCALE, out, out_per_step, old_softmax_lse, new_softmax_lse, softmax_lse_per_step, seq_dim)


def incremental_second_half_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_softmax_lse: torch.Tensor,
    new_softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """`reference.incremental_second_half_out_correction_` on a GPU."""
    old, new = reference.second_half(old_softmax_lse), reference.second_half(new_softmax_lse)
    incremental_out_correction_(out.select(seq_dim, 1), out_per_step, old, new, softmax_lse_per_step, seq_dim)


def merge_(
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """`reference.merge_` on a GPU, in one pass over LSE and output."""
    _correct(MERGE, out, out_per_step, softmax_lse, softmax_lse, softmax_lse_per_step, seq_dim)


def _correct(
    form: int,
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_lse: torch.Tensor,
    new_lse: torch.Tensor,
    step_lse: torch.Tensor,
    seq_dim: int,
) -> None:
    for lse in (old_lse, new_lse):
        reference.require_mergeable(lse, step_lse)
    reference.require_correctable(out, out_per_step, step_lse, seq_dim)
    if out.numel() == 0:
        return
    # [b, h, s] seen in the order of the output's first three dimensions.
    old, new, step = (lse.movedim(2, seq_dim) for lse in (old_lse, new_lse, step_lse))
    columns = out.shape[-1]
    block_columns = min(OUT_COLUMNS, triton.next_power_of_2(columns))
    rows = out.numel() // columns
    if rows > 2**31 - 1:
        raise ValueError(f"LSE merge: {rows} rows of output; at most 2^31 - 1 are addressed in one launch")
    with torch.cuda.device_of(out):
        _out_kernel[(triton.cdiv(rows, OUT_ROWS),)](
            out, out_per_step, old, new, step,
            *out.stride(), *out_per_step.stride(), *old.stride(), *new.stride(), *step.stride(),
            rows, out.shape[1], out.shape[2], columns,
            FORM=form, WIDE=torch.float64 in {x.dtype for x in (out, out_per_step, old, new, step)},
            BLOCK_ROWS=OUT_ROWS, BLOCK_COLUMNS=block_columns, COLUMN_BLOCKS=triton.cdiv(columns, block_columns),
            WHOLE=columns % block_columns == 0, ASSEMBLY=ASSEMBLY,
            num_warps=OUT_ROWS // threads_of_a_warp(), num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


@functools.cache
def threads_of_a_warp() -> int:
    """64 on the AMD GPUs of data centers, 32 on NVIDIA's; the interpreter does not care."""
    return 64 if torch.version.hip else 32


def _three_dimensions(x: torch.Tensor) -> torch.Tensor | None:
    """A view of `x` with three dimensions, one if `x` is contiguous; None where strides do not allow it."""
    if x.is_contiguous():
        return x.view(1, 1, -1)
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x if x.dim() == 3 else None


@triton.jit
def _read_lse(lse):
    """float64; +inf, a row without keys in some kernels, is -inf."""
    value = lse.to(tl.float64)
    return tl.where(value == _INF, -_INF, value)


@triton.jit
def _merged(first, second):
    """float64 LSEs as `_read_lse` gives them -> their join."""
    high = tl.where(first > second, first, second)
    low = tl.where(first > second, second, first)
    merged = high + log1p_of_unit_f64(exp_f64(low - high))
    return tl.where((first == -_INF) & (second == -_INF), -_INF, merged)


@triton.jit
def _merge_kernel(
    lse_ptr, step_ptr, lse_stride_0, lse_stride_1, lse_stride_2, step_stride_0, step_stride_1, step_stride_2,
    size_1, size_2, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = program // blocks
    position = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    first, second = (row // size_1).to(tl.int64), (row % size_1).to(tl.int64)
    inside = position < size_2
    lse_at = lse_ptr + first * lse_stride_0 + second * lse_stride_1 + position * lse_stride_2
    step_at = step_ptr + first * step_stride_0 + second * step_stride_1 + position * step_stride_2
    lse = _read_lse(tl.load(lse_at, mask=inside, other=0.0))
    step = _read_lse(tl.load(step_at, mask=inside, other=0.0))
    tl.store(lse_at, _merged(lse, step).to(lse_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _once(x, ASSEMBLY: tl.constexpr):
    """`x` unchanged, as something the compiler must not compute twice.

    Left alone, Triton recomputes a row's float64 values in every thread that holds columns of the row, to save one
    exchange through shared memory.
    """
    if ASSEMBLY == "":
        return x
    elif ASSEMBLY == "amdgcn":
        return tl.inline_asm_elementwise("", "=v,0", [x], dtype=x.dtype, is_pure=False, pack=1)
    elif x.dtype == tl.float64:
        return tl.inline_asm_elementwise("mov.f64 $0, $1;", "=d,d", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def _weighted(value, weight, no_keys, COMPUTE: tl.constexpr):
    """[R, C] value times [R] weight in COMPUTE; 0 in rows without keys, whatever they hold."""
    product = value.to(COMPUTE) * weight[:, None]
    return tl.where(no_keys[:, None], 0.0, product)


@triton.jit
def _out_kernel(
    out_ptr, step_out_ptr, old_ptr, new_ptr, step_ptr,
    out_stride_0, out_stride_1, out_stride_2, out_stride_3,
    step_out_stride_0, step_out_stride_1, step_out_stride_2, step_out_stride_3,
    old_stride_0, old_stride_1, old_stride_2,
    new_stride_0, new_stride_1, new_stride_2,
    step_stride_0, step_stride_1, step_stride_2,
    rows, size_1, size_2, columns,
    FORM: tl.constexpr, WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr, WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    COMPUTE: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    row_inside = row < rows
    # A row number has at most 31 bits: divide it as such.
    narrow = row.to(tl.int32)
    i0 = (narrow // (size_1 * size_2)).to(tl.int64)
    i1 = ((narrow // size_2) % size_1).to(tl.int64)
    i2 = (narrow % size_2).to(tl.int64)

    step_lse = tl.load(
        step_ptr + i0 * step_stride_0 + i1 * step_stride_1 + i2 * step_stride_2, mask=row_inside, other=0.0
    )
    step = _read_lse(step_lse)
    old_at = old_ptr + i0 * old_stride_0 + i1 * old_stride_1 + i2 * old_stride_2
    old = _read_lse(tl.load(old_at, mask=row_inside, other=0.0))
    if FORM == _MERGE:
        # Rounded to the accumulator before the weights look at it, as the separate functions do.
        joined = _merged(old, step).to(old_ptr.dtype.element_ty)
        new = joined.to(tl.float64)
    else:
        new = _read_lse(
            tl.load(
                new_ptr + i0 * new_stride_0 + i1 * new_stride_1 + i2 * new_stride_2,
                mask=row_inside,
                other=0.0,
            )
        )

    # One thread computes a row; what it found is handed to the threads that hold the row's columns, so that a warp
    # reads whole rows of the output side by side.
    weight = _once(exp_f64(step - new).to(COMPUTE), ASSEMBLY)
    step_empty = _once(tl.where(step == -_INF, 1.0, 0.0).to(tl.float32), ASSEMBLY) != 0.0
    if FORM != _SCALE and FORM != _ADD:
        old_weight = _once(exp_f64(old - new).to(COMPUTE), ASSEMBLY)
        old_empty = _once(tl.where(old == -_INF, 1.0, 0.0).to(tl.float32), ASSEMBLY) != 0.0
    out_rows = out_ptr + (i0 * out_stride_0 + i1 * out_stride_1 + i2 * out_stride_2)[:, None]
    step_out_rows = (
        step_out_ptr + (i0 * step_out_stride_0 + i1 * step_out_stride_1 + i2 * step_out_stride_2)[:, None]
    )
    for block in tl.static_range(COLUMN_BLOCKS):
        column = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS).to(tl.int64)  # [C]
        # Without a comparison per column whole vectors are loaded at once.
        inside = row_inside[:, None] if WHOLE else row_inside[:, None] & (column < columns)[None, :]
        out_at = out_rows + (column * out_stride_3)[None, :]
        step_out = tl.load(step_out_rows + (column * step_out_stride_3)[None, :], mask=inside, other=0.0)
        result = _weighted(step_out, weight, step_empty, COMPUTE)
        if FORM == _ADD:
            result = tl.load(out_at, mask=inside, other=0.0).to(COMPUTE) + result
        elif FORM != _SCALE:
            out = tl.load(out_at, mask=inside, other=0.0)
            result = _weighted(out, old_weight, old_empty, COMPUTE) + result
        if out_ptr.dtype.element_ty != tl.float64:
            # One rounding to float32 on the way from float64 to a 16-bit dtype, as the reference.
            result = result.to(tl.float32)
        if out_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(out_at, to_bfloat16(result), mask=inside)
        else:
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=inside)
    if FORM == _MERGE:
        # Should several threads hold the same row, each has read its LSE for itself. Only now, with every output
        # computed from what was read, may one of them overwrite it.
        tl.debug_barrier()
        tl.store(old_at, joined, mask=row_inside)


# What the device's inline assembly is written in; Triton's interpreter has none.
ASSEMBLY = "" if not isinstance(_out_kernel, triton.JITFunction) else "amdgcn" if torch.version.hip else "ptx"
