"""`reference.py` and `add.py` as Triton kernels: `forward_kernel.py` and `backward_kernel.py`.

A row is added by a tree that is written out level by level, and belongs to one program, so nothing in the launch table
below can change a bit: neither rows nor chains of a program, nor its threads.

Every function takes what the reference takes and raises what it raises. Use `ops.py`, which picks between the two.
"""

from __future__ import annotations

import struct

import torch
import triton

from te_overrides.kernels.granules.reference import GRANULE
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
from te_overrides.kernels.rmsnorm.add import require_addable
from te_overrides.kernels.rmsnorm.backward_kernel import backward_kernel, long_rows_kernel, partials_kernel
from te_overrides.kernels.rmsnorm.forward_kernel import forward_kernel

MOST_COLUMNS = 32768
MOST_SUMMED_COLUMNS = 8192
"""Longer rows leave no registers for the weight's sums: a pass of their own."""
PIECE_LEVELS, PIECE_THREADS = 13, 512
PARTIAL_COLUMNS, PARTIAL_THREADS = 1024, 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_plans = Plans()


def forward_launch(columns: int, hip: bool) -> tuple[int, int]:
    """(rows, threads) of a program of the forward kernel.

    NVIDIA: 32 columns a thread, measured on an H200. AMD: 16, where none spills on gfx942 and gfx950.
    """
    width = triton.next_power_of_2(columns)
    if hip:
        return max(1, 2048 // width), min(1024, max(128, width // 16))
    return max(1, 1024 // width), min(1024, max(64, width // 32))


def backward_launch(columns: int, hip: bool) -> tuple[int, int]:
    """(chains, threads) of a program of the backward kernel, as in `forward_launch`."""
    width = triton.next_power_of_2(columns)
    if hip:
        return max(1, 1024 // width), min(1024, max(128, width // 16))
    return max(1, 512 // width), min(1024, max(64, width // 32))


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rmsnorm` on a GPU."""
    out, _, rstd = _forward(x, None, weight, eps, zero_centered)
    return out, rstd


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add.add_rmsnorm` on a GPU, in one pass."""
    require_addable(x, residual)
    return _forward(x, residual, weight, eps, zero_centered)


def rmsnorm_backward_partials(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
    groups: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rmsnorm_backward_partials` on a GPU."""
    return _backward(grad, None, x, weight, rstd, zero_centered, groups)


def add_rmsnorm_backward_partials(
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add.add_rmsnorm_backward_partials` on a GPU, in one pass."""
    require_addable(grad_out, grad_residual_out)
    return _backward(grad_out, grad_residual_out, residual_out, weight, rstd, zero_centered, None)


def _require(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(
            f"RMSNorm: activations are {x.dtype}, the weight is {weight.dtype}; the kernel takes {DTYPES}"
        )
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"RMSNorm: the weight is {tuple(weight.shape)}, rows have {x.shape[-1]} columns")
    if x.shape[-1] > MOST_COLUMNS:
        raise ValueError(
            f"RMSNorm: rows of {x.shape[-1]} columns; one program holds a row, of at most {MOST_COLUMNS}. Run the "
            "reference (te_overrides/kernels/rmsnorm/reference.py), which has the same bits."
        )


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _require(x, weight)
    x, weight = with_rows(x), weight.contiguous()
    added = x if residual is None else with_rows(residual)
    key = (
        "forward", x.device, signature(x), residual is None or signature(added), signature(weight), eps,
        zero_centered,
    )  # fmt: skip
    launch = _plans(key, _plan_forward, x, added, residual is not None, eps, zero_centered)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual_out = out if residual is None else torch.empty_like(out)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if out.numel():
        with device_of(x):
            launch(x, added, weight, out, residual_out, rstd)
    return out, residual_out, rstd


def _plan_forward(x: torch.Tensor, added: torch.Tensor, add: bool, eps: float, zero_centered: bool) -> Launch:
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    (epsilon_bits,) = struct.unpack("<q", struct.pack("<d", eps))
    per_program, threads = forward_launch(columns, bool(torch.version.hip))
    constants = {
        "COLUMNS": columns,
        "LEVELS": (columns - 1).bit_length(),
        "ROWS": per_program,
        "ADD": add,
        "ZERO_CENTERED": zero_centered,
        "NATIVE": rounds_natively(forward_kernel),
    }
    return Launch(
        forward_kernel,
        (triton.cdiv(rows, per_program), 1, 1),
        (rows, row_stride(x), row_stride(added), epsilon_bits),
        constants,
        options(threads),
    )


def _backward(
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    groups: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _require(x, weight)
    if x.dim() != (3 if groups is None else 4) or grad.shape != x.shape or grad.dtype != x.dtype:
        raise ValueError(
            f"RMSNorm backward: x is {x.dtype} {tuple(x.shape)}, its gradient {grad.dtype} {tuple(grad.shape)}, groups "
            f"{groups}; granules are cut from [s, B, H], or from [s, B, heads, d] with groups"
        )
    if groups is not None and x.shape[2] % groups:
        raise ValueError(f"RMSNorm backward: {groups} groups do not divide {x.shape[2]} heads")
    grad, x, weight, rstd = with_rows(grad), with_rows(x), weight.contiguous(), rstd.contiguous()
    stream = grad if grad_residual is None else with_rows(grad_residual)
    tensors = (grad, x, weight, rstd, stream)
    key = ("backward", x.device, *map(signature, tensors), zero_centered, groups, grad_residual is None)
    launch, sum_launch, shape = _plans(
        key, _plan_backward, grad, x, stream, grad_residual is not None, zero_centered, groups
    )
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    if dx.numel():
        with device_of(x):
            if sum_launch is None:
                launch(*tensors, dx, partials)
            else:
                launch(*tensors, dx)
                sum_launch(grad, x, rstd, partials)
    return dx, partials


def _plan_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    stream: torch.Tensor,
    add: bool,
    zero_centered: bool,
    groups: int | None,
) -> tuple[Launch, Launch | None, tuple[int, ...]]:
    """The launches (the second is absent where the first adds the partials up) and the shape of the partials."""
    positions, batch, columns = x.shape[0], x.shape[1], x.shape[-1]
    granules, inners = triton.cdiv(positions, GRANULE), batch * (groups or 1)
    shape = (granules, batch, columns) if groups is None else (granules, batch, groups, columns)
    strides = (row_stride(grad), row_stride(x), row_stride(stream))
    levels = (columns - 1).bit_length()
    native = {"NATIVE": rounds_natively(backward_kernel)}
    forms = {"ADD": add, "ZERO_CENTERED": zero_centered} | native
    heads = x.shape[2] // groups if groups else 1
    if columns <= MOST_SUMMED_COLUMNS:
        chains, threads = backward_launch(columns, bool(torch.version.hip))
        launch = Launch(
            backward_kernel,
            (triton.cdiv(granules, chains), inners, 1),
            (positions, inners, *strides),
            {"COLUMNS": columns, "LEVELS": levels, "CHAINS": chains, "HEADS": heads, "GRANULE": GRANULE}
            | forms,
            options(threads),
        )
        return launch, None, shape
    if groups is not None:
        raise ValueError(
            f"RMSNorm backward: heads of {columns} columns; at most {MOST_SUMMED_COLUMNS} with groups"
        )
    launch = Launch(
        long_rows_kernel,
        (positions * inners, 1, 1),
        strides,
        {"COLUMNS": columns, "PIECE_LEVELS": PIECE_LEVELS, "MORE_LEVELS": levels - PIECE_LEVELS} | forms,
        options(PIECE_THREADS),
    )
    sums = Launch(
        partials_kernel,
        (granules, inners, triton.cdiv(columns, PARTIAL_COLUMNS)),
        (positions, inners, *strides[:2]),
        {"COLUMNS": columns, "BLOCK": PARTIAL_COLUMNS, "GRANULE": GRANULE} | native,
        options(PARTIAL_THREADS),
    )
    return launch, sums, shape
