"""Where a result may be written: every element of `out` in a place of its own, or the last writer would win unseen."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class CollectiveError(ValueError):
    """A collective was asked for something the contract does not define."""


def require_out(out: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raises CollectiveError where `out` does not fit a result of `shape` and `dtype`."""
    if out is None:
        return
    if out.shape != shape or out.dtype != dtype:
        raise CollectiveError(
            f"out is {out.dtype} {tuple(out.shape)}; the result is {dtype} {tuple(shape)}. Give a buffer of that "
            "shape and dtype."
        )
    if _is_folded(out):
        raise CollectiveError(
            f"out of shape {tuple(out.shape)} has strides {out.stride()}: several of its elements lie in one place. "
            "Give a buffer that is not expanded."
        )


def require_apart(outs: Sequence[torch.Tensor | None]) -> None:
    """Raises CollectiveError where two of `outs` share memory; interleaved ones count as sharing."""
    spans = sorted((*_span(out), index) for index, out in enumerate(outs) if out is not None and out.numel())
    for (_, end, one), (start, _, other) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise CollectiveError(
                f"outs {min(one, other)} and {max(one, other)} share memory, and each sum would overwrite the other's. "
                "Give one buffer a sum, or make the calls one after the other."
            )


def copied(tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Each tensor in its `out`, or itself without one, whichever memory they share with each other."""
    written = {out.untyped_storage().data_ptr() for out in outs if out is not None}
    sources = [
        x.clone() if out is not x and x.untyped_storage().data_ptr() in written else x
        for x, out in zip(tensors, outs, strict=True)
    ]
    return [x if out is None or out is x else out.copy_(x) for x, out in zip(sources, outs, strict=True)]


def _is_folded(x: torch.Tensor) -> bool:
    """Whether two elements may lie in one place: a stride that does not step over all smaller ones."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the one behind its last."""
    last = sum(stride * (size - 1) for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
