"""`reference.py` as Triton kernels: `lse_kernel.py` for LSEs, `out_kernel.py` for outputs.

Nothing in them depends on how many elements a program or a thread has, so the launch table below is a matter of speed
only. There is no autotuning: one launch per form, the same in every process.

Every function takes what the reference takes and raises what it raises. Use `ops.py`, which picks between the two.
"""

from __future__ import annotations

import torch
import triton

from te_overrides.kernels.launching import Launch, Plans, device_of, options, signature
from te_overrides.kernels.lse_merge import reference
from te_overrides.kernels.lse_merge.lse_kernel import (
    ADD,
    MERGE,
    RESCALE,
    SCALE,
    merge_kernel,
    weights_kernel,
)
from te_overrides.kernels.lse_merge.out_kernel import correct_kernel

# The launch table: elements of a program and its threads. No program has fewer elements than threads, so that no two
# threads hold the same element of an LSE that is written in place.
MERGE_BLOCK, MERGE_THREADS = 1024, 128
WEIGHTS_BLOCK, WEIGHTS_THREADS = 256, 128
OUT_ROWS, OUT_COLUMNS, OUT_THREADS = 32, 128, 256

_plans = Plans()


def merge_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """`reference.merge_lse_` on a GPU."""
    key = (softmax_lse.device, signature(softmax_lse), signature(softmax_lse_per_step))
    plan = _plans(key, _plan_merge, softmax_lse, softmax_lse_per_step)
    if plan is None:
        return
    with device_of(softmax_lse):
        if isinstance(plan, Launch):
            plan(softmax_lse, softmax_lse_per_step)
            return
        # Neither layout can be walked in three strides: take the long way through contiguous copies.
        copy = softmax_lse.contiguous()
        merge_lse_(copy, softmax_lse_per_step.contiguous())
        softmax_lse.copy_(copy)


def _plan_merge(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> Launch | str | None:
    reference.require_mergeable(softmax_lse, softmax_lse_per_step)
    if softmax_lse.numel() == 0:
        return None
    pair = (softmax_lse, softmax_lse_per_step)
    if all(x.is_contiguous() for x in pair):
        lse, step = (x.view(1, 1, -1) for x in pair)
    elif softmax_lse.dim() <= 3:
        lse, step = (x[(None,) * (3 - x.dim())] for x in pair)
    else:
        return "copy"
    first, second, length = lse.shape
    blocks = triton.cdiv(length, MERGE_BLOCK)
    integers = (*lse.stride(), *step.stride(), second, length, blocks)
    grid = (first * second * blocks, 1, 1)
    return Launch(merge_kernel, grid, integers, {"BLOCK": MERGE_BLOCK}, options(MERGE_THREADS))


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
    """`reference.merge_` on a GPU, in one pass over the output."""
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
    tensors = (out, out_per_step, old_lse, new_lse, step_lse)
    key = (form, seq_dim, out.device, *map(signature, tensors))
    plan = _plans(key, _plan_correction, form, *tensors, seq_dim)
    if plan is None:
        return
    weigh, correct, dtype, count = plan
    with device_of(out):
        weights = torch.empty(count, dtype=dtype, device=out.device)
        weigh(old_lse, new_lse, step_lse, weights)
        if correct is not None:
            correct(out, out_per_step, weights)


def _plan_correction(
    form: int,
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_lse: torch.Tensor,
    new_lse: torch.Tensor,
    step_lse: torch.Tensor,
    seq_dim: int,
) -> tuple[Launch, Launch | None, torch.dtype, int] | None:
    """Both launches (the second is absent where outputs have no columns), dtype and number of the weights."""
    for lse in (old_lse, new_lse):
        reference.require_mergeable(lse, step_lse)
    reference.require_correctable(out, out_per_step, step_lse, seq_dim)
    _, heads, length = step_lse.shape
    rows = step_lse.numel()
    if rows == 0:
        return None
    if rows > 2**31 - 1:
        raise ValueError(f"LSE merge: {rows} rows of output; at most 2^31 - 1 are addressed in one launch")
    wide = torch.float64 in (out.dtype, out_per_step.dtype, old_lse.dtype, new_lse.dtype, step_lse.dtype)
    weigh = Launch(
        weights_kernel,
        (triton.cdiv(rows, WEIGHTS_BLOCK), 1, 1),
        (*old_lse.stride(), *new_lse.stride(), *step_lse.stride(), rows, heads, length),
        {"FORM": form, "BLOCK": WEIGHTS_BLOCK},
        options(WEIGHTS_THREADS),
    )
    columns = out.shape[-1]
    correct = None
    if columns:
        block_columns = min(OUT_COLUMNS, triton.next_power_of_2(columns))
        # Weights lie as [b, h, s]; the output's first three dimensions are [b, s, h] or [s, b, h].
        strides = (heads * length, 1, length) if seq_dim == 1 else (1, heads * length, length)
        correct = Launch(
            correct_kernel,
            (triton.cdiv(rows, OUT_ROWS), triton.cdiv(columns, block_columns), 1),
            (*out.stride(), *out_per_step.stride(), *strides, rows, out.shape[1], out.shape[2], columns),
            {
                "FORM": form,
                "BLOCK_ROWS": OUT_ROWS,
                "BLOCK_COLUMNS": block_columns,
                "WHOLE": columns % block_columns == 0,
            },
            options(OUT_THREADS),
        )
    count = rows * (2 if form in (RESCALE, MERGE) else 1)
    return weigh, correct, torch.float64 if wide else torch.float32, count
