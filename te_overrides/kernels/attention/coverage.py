"""What the attention kernels cover, refused by name before a launch: on a GPU nothing falls back to other bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from te_overrides.kernels.attention.launch_table import HEAD_DIMS
from te_overrides.kernels.attention.reference import AttentionError, check_operands

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class KernelCoverageError(AttentionError):
    """The contract covers it, the kernels do not: there is no GPU arithmetic for it."""


@dataclass(frozen=True)
class Problem:
    """The scales as the kernels take them, each rounded to float32 once.

    Attributes:
        score_scale: of scores, in units of log 2.
        softmax_scale: of dQ and dK.
        hip: whether AMD's compiler options apply.
    """

    score_scale: float
    softmax_scale: float
    hip: bool


def require_covered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float | None,
    grad_out: torch.Tensor | None = None,
) -> Problem:
    """Verify operands [s, b, h, d] for a launch.

    Raises:
        AttentionError: operands that do not fit together.
        KernelCoverageError: a dtype, head dimension, scale or stride that the kernels do not cover.
    """
    check_operands(query, key, value)
    if query.dtype not in KERNEL_DTYPES:
        raise KernelCoverageError(
            f"operands are {query.dtype}: the attention kernels cover {', '.join(map(str, KERNEL_DTYPES))}. Run the "
            "model in one of those, or on a CPU, where the reference covers float32."
        )
    d, d_v = query.shape[-1], value.shape[-1]
    if d not in HEAD_DIMS or d_v not in HEAD_DIMS or d_v > d:
        raise KernelCoverageError(
            f"head dimension {d} for queries and keys, {d_v} for values: the attention kernels cover {HEAD_DIMS} with "
            "values no wider than keys. Pad the head dimension with zeros (and pass softmax_scale), or use another."
        )
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    if not 0.0 < scale < math.inf:
        raise KernelCoverageError(
            f"softmax_scale={scale}: the attention kernels take a positive, finite scale, since a row's maximum is "
            "taken before the scale. Negate the queries for a negative one."
        )
    if grad_out is not None and (
        grad_out.shape != (*query.shape[:3], d_v) or grad_out.dtype is not query.dtype
    ):
        raise AttentionError(
            f"grad_out is {grad_out.dtype} {tuple(grad_out.shape)}; for query {tuple(query.shape)} and value "
            f"{tuple(value.shape)} it must be {query.dtype} {(*query.shape[:3], d_v)}"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() and x.stride(0) >= 1 << 22:
            raise KernelCoverageError(
                f"{name}: one row to the next is {x.stride(0)} elements; tiles are addressed with fewer than "
                f"{1 << 22}; pass a contiguous tensor."
            )
    return _problem(scale)


@functools.lru_cache(maxsize=64)
def _problem(scale: float) -> Problem:
    return Problem(_round32(scale * math.log2(math.e)), _round32(scale), torch.version.hip is not None)


def _round32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()
