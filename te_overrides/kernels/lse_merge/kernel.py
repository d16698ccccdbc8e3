"""`reference.py` as Triton kernels: `lse_kernel.py` for LSEs, `out_kernel.py` for outputs.

Nothing in them depends on how many elements a program or a thread has, so the launch table below is a matter of speed
only. There is no autotuning: one launch per form, the same in every process.

Every function takes what the reference takes and raises what it raises. Use `ops.py`, which picks between the two.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from te_overrides.kernels.launching import Launcher
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

_merge, _weights, _correct_out = Launcher(merge_kernel), Launcher(weights_kernel), Launcher(correct_kernel)


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
    _merge(
        (first * second * blocks, 1, 1),
        (lse, step),
        (*lse.stride(), *step.stride(), second, length, blocks),
        {"BLOCK": MERGE_BLOCK},
        options(MERGE_THREADS),
    )


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
    for lse in {id(old_lse): old_lse, id(new_lse): new_lse}.values():
        reference.require_mergeable(lse, step_lse)
    reference.require_correctable(out, out_per_step, step_lse, seq_dim)
    batch, heads, length = step_lse.shape
    rows = step_lse.numel()
    if rows == 0:
        return
    if rows > 2**31 - 1:
        raise ValueError(f"LSE merge: {rows} rows of output; at most 2^31 - 1 are addressed in one launch")
    wide = torch.float64 in (out.dtype, out_per_step.dtype, old_lse.dtype, new_lse.dtype, step_lse.dtype)
    weights = torch.empty(
        (2 if form in (RESCALE, MERGE) else 1, rows),
        dtype=torch.float64 if wide else torch.float32,
        device=out.device,
    )
    _weights(
        (triton.cdiv(rows, WEIGHTS_BLOCK), 1, 1),
        (old_lse, new_lse, step_lse, weights),
        (*old_lse.stride(), *new_lse.stride(), *step_lse.stride(), rows, heads, length),
        {"FORM": form, "BLOCK": WEIGHTS_BLOCK},
        options(WEIGHTS_THREADS),
    )
    columns = out.shape[-1]
    if columns == 0:
        return
    block_columns = min(OUT_COLUMNS, triton.next_power_of_2(columns))
    # Weights lie as [b, h, s]; the output's first three dimensions are [b, s, h] or [s, b, h].
    strides = (heads * length, 1, length) if seq_dim == 1 else (1, heads * length, length)
    _correct_out(
        (triton.cdiv(rows, OUT_ROWS), triton.cdiv(columns, block_columns), 1),
        (out, out_per_step, weights),
        (*out.stride(), *out_per_step.stride(), *strides, rows, out.shape[1], out.shape[2], columns),
        {
            "FORM": form,
            "BLOCK_ROWS": OUT_ROWS,
            "BLOCK_COLUMNS": block_columns,
            "WHOLE": columns % block_columns == 0,
        },
        options(OUT_THREADS),
    )


@functools.cache
def threads_of_a_warp() -> int:
    """64 on the AMD GPUs of data centers, 32 on NVIDIA's; the interpreter does not care."""
    return 64 if torch.version.hip else 32


@functools.cache
def options(threads: int) -> dict[str, Any]:
    """Compiler options of a launch with so many threads a program."""
    return {"num_warps": threads // threads_of_a_warp(), "num_stages": 1, "enable_fp_fusion": False}


def _three_dimensions(x: torch.Tensor) -> torch.Tensor | None:
    """A view of `x` with three dimensions, one if `x` is contiguous; None where strides do not allow it."""
    if x.is_contiguous():
        return x.view(1, 1, -1)
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x if x.dim() == 3 else None
