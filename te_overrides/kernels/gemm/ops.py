"""The products of the contract on the device at hand: the reference on a CPU, kernels on a GPU.

On a GPU there are two kernels of one arithmetic, the portable one and one for Hopper. Which of them takes a product
depends on its shape and layout and cannot change a bit. Nothing falls back to the reference there: its bits are of
another class.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from te_overrides.kernels.architecture import has_hopper_kernels
from te_overrides.kernels.devices import on_gpu
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.gemm import certified, reference
from te_overrides.kernels.gemm.reference import LANES, LaneError, lanes_per_rank
from te_overrides.kernels.swiglu.ops import swiglu_packed


def _on_gpu(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> bool:
    """Whether kernels take it.

    Raises:
        DeviceError: operands on several devices.
        LaneError: operands of two dtypes.
    """
    if a.dtype != b.dtype:
        raise LaneError(
            f"a product of {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}: both must have one dtype. "
            "Convert one of them explicitly."
        )
    return on_gpu("matrix product", a=a, b=b, out=out)


def _hopper(a: torch.Tensor, b: torch.Tensor, **lanes: Any) -> ModuleType | None:
    """The Hopper kernel's module where it takes a product; `lanes` as in its `obstacle`."""
    if not has_hopper_kernels(a.device):
        return None
    from te_overrides.kernels.gemm import hopper

    return hopper if hopper.obstacle(a, b, **lanes) is None else None


def _by_hopper(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    *,
    lane: torch.dtype | None = None,
    positive: bool = False,
    **lanes: int,
) -> torch.Tensor | None:
    """The product in `dtype` by the Hopper kernel, or None where that one does not take it."""
    if dtype not in (a.dtype, torch.float32) or (hopper := _hopper(a, b, lane=lane, **lanes)) is None:
        return None
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    hopper.product(a, b, out, positive=positive, **lanes)
    return out


@eager_only
def one_lane(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``A @ B^T`` as one chain, rounded once to `dtype` (default: that of `a`). See the reference.

    Args:
        a, b: [M, K], [N, K], any strides.

    Raises:
        LaneError: operands that do not fit.
    """
    if not _on_gpu(a=a, b=b):
        return reference.one_lane(a, b, dtype)
    if (out := certified.product(a, b, dtype or a.dtype)) is not None:
        return out
    return own_one_lane(a, b, dtype)


def own_one_lane(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`one_lane` on a GPU by our own kernels."""
    if (out := _by_hopper(a, b, dtype or a.dtype)) is not None:
        return out
    from te_overrides.kernels.gemm import kernel

    return kernel.one_lane(a, b, dtype)


@eager_only
def gated(a: torch.Tensor, b: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SwiGLU of a packed projection: ``silu(A G^T) * (A U^T)``, every stage rounded as by itself.

    Args:
        a: [M, K].
        b: [2 N, K], the gate's rows G, then the up projection's rows U.
        keep: whether the projections themselves are wanted as well.

    Returns:
        [M, N], and [M, 2 N] or None.

    Raises:
        LaneError: operands that do not fit.
    """
    if not _on_gpu(a=a, b=b) or a.dtype == torch.float32:
        packed = one_lane(a, b)
        return swiglu_packed(packed), packed if keep else None
    if has_hopper_kernels(a.device):
        from te_overrides.kernels.gemm import hopper_gated

        if hopper_gated.obstacle(a, b) is None:
            rows, columns = a.shape[0], b.shape[0]
            out = torch.empty(rows, columns // 2, dtype=a.dtype, device=a.device)
            kept = torch.empty(rows, columns, dtype=a.dtype, device=a.device) if keep else None
            hopper_gated.gated(a, b, out, kept)
            return out, kept
    from te_overrides.kernels.gemm import gated_kernel

    return gated_kernel.gated(a, b, keep)


@eager_only
def gradient(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`one_lane` with every zero of the result positive, as gradients are handed on.

    Args:
        a, b: [M, K], [N, K], any strides.
        dtype: of the result; float32 is not rounded.
    """
    if _on_gpu(a=a, b=b) and dtype == a.dtype and (out := _by_hopper(a, b, dtype, positive=True)) is not None:
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
    if out.dtype != torch.float32 or out.shape != (a.shape[0], b.shape[0]):
        raise LaneError(
            f"a product of {tuple(a.shape)} and {tuple(b.shape)} cannot be added to {out.dtype} {tuple(out.shape)}: "
            f"it needs float32 {(a.shape[0], b.shape[0])}."
        )
    if _on_gpu(a=a, b=b, out=out) and out.stride(-1) == 1 and (hopper := _hopper(a, b)):
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
    if not _on_gpu(a=a, b=b):
        return reference.lane_tree(a, b, tp_size=tp_size, dtype=dtype, segments=segments, lanes=lanes)
    sizes = list(segments) if segments is not None else [a.shape[1]]
    count = lanes_per_rank(tp_size, lanes)
    if len(set(sizes)) == 1 and sum(sizes) == a.shape[1]:
        out = _by_hopper(a, b, a.dtype, lane=dtype, count=count, segments=len(sizes))
        if out is not None:
            return out
    from te_overrides.kernels.gemm import kernel

    return kernel.lane_tree(a, b, tp_size=tp_size, dtype=dtype, segments=segments, lanes=lanes)
