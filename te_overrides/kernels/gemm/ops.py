"""The products of the contract on the device at hand: the reference on a CPU, kernels on a GPU.

On a GPU there are two kernels of one arithmetic, the portable one and one for Hopper. Which of them takes a product
depends on its shape and layout and cannot change a bit. Nothing falls back to the reference there: its bits are of
another class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_overrides.kernels import accounting
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.gemm import reference
from te_overrides.kernels.gemm.reference import LANES, LaneError, lanes_per_rank


def _hopper(a: torch.Tensor, b: torch.Tensor, count: int, segments: int, lane: torch.dtype | None) -> bool:
    """Whether the Hopper kernel takes a product."""
    from te_overrides.kernels.gemm.kernel import architecture

    if architecture(a.device) != "sm_90":
        return False
    from te_overrides.kernels.gemm import hopper

    return hopper.obstacle(a, b, count=count, segments=segments, lane=lane) is None


@eager_only
def one_lane(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``A @ B^T`` as one chain, rounded once to `dtype` (default: that of `a`). See the reference.

    Args:
        a, b: [M, K], [N, K], any strides.

    Raises:
        LaneError: operands that do not fit.
    """
    if not a.is_cuda:
        return reference.one_lane(a, b, dtype)
    _require_product(a, b)
    dtype = dtype or a.dtype
    if dtype in (a.dtype, torch.float32) and _hopper(a, b, 1, 1, None):
        from te_overrides.kernels.gemm import hopper

        out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
        hopper.product(a, b, out)
        return out
    from te_overrides.kernels.gemm import kernel

    return kernel.one_lane(a, b, dtype)


@eager_only
def gradient(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`one_lane` with every zero of the result positive, as gradients are handed on.

    Args:
        a, b: [M, K], [N, K], any strides.
        dtype: of the result; float32 is not rounded.
    """
    if a.is_cuda and dtype == a.dtype and _hopper(a, b, 1, 1, None):
        from te_overrides.kernels.gemm import hopper

        _require_product(a, b)
        out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
        hopper.product(a, b, out, positive=True)
        return out
    return one_lane(a, b, dtype).add_(0.0)


@eager_only
def add_one_lane_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out += A @ B^T``: the chain, unrounded in float32, then one addition to `out`.

    Args:
        out: [M, N] float32.
        a, b: [M, K], [N, K].

    Raises:
        LaneError: operands that do not fit.
    """
    if a.is_cuda and out.stride(-1) == 1 and _hopper(a, b, 1, 1, None):
        from te_overrides.kernels.gemm import hopper

        _require_product(a, b)
        hopper.product(a, b, out, add=True)
        return
    out.add_(one_lane(a, b, torch.float32))


@eager_only
def lane_tree(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tp_size: int,
    dtype: torch.dtype | None = None,
    segments: Sequence[int] | None = None,
    lanes: int = LANES,
) -> torch.Tensor:
    """This rank's subtree of the eight-lane contraction ``A @ B^T``. See the reference.

    Raises:
        LaneError: a size that the lanes do not divide.
    """
    if not a.is_cuda:
        return reference.lane_tree(a, b, tp_size=tp_size, dtype=dtype, segments=segments, lanes=lanes)
    sizes = list(segments) if segments is not None else [a.shape[1]]
    count = lanes_per_rank(tp_size, lanes)
    if len(set(sizes)) == 1 and sum(sizes) == a.shape[1] and _hopper(a, b, count, len(sizes), dtype):
        from te_overrides.kernels.gemm import hopper

        _require_product(a, b)
        out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
        hopper.product(a, b, out, count=count, segments=len(sizes))
        return out
    from te_overrides.kernels.gemm import kernel

    return kernel.lane_tree(a, b, tp_size=tp_size, dtype=dtype, segments=segments, lanes=lanes)


def _require_product(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        raise LaneError(
            f"a chain contracts [M, K] with [N, K] of one dtype; got {a.dtype} {tuple(a.shape)} and {b.dtype} "
            f"{tuple(b.shape)}. Flatten tokens first and pass the weight as [out, in]."
        )
    accounting.flops(a.shape[0] * b.shape[0] * a.shape[1])
