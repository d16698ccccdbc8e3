"""Rotary position embedding with autograd: the reference on a CPU, kernels of the same bits on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from te_overrides.kernels.devices import on_gpu
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.rope.reference import Rope

_NAME = "_deterministic_rope_tables"


def _tables(freqs: torch.Tensor, dtype: torch.dtype, mscale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of `freqs`, kept on that tensor: every layer of a forward pass is handed the same one.

    Not kept while a graph is captured (its replays must read what the angles are then) nor of inference tensors (which
    do not tell whether they were written to), and not used after the angles were written to, or on another stream.
    """
    from te_overrides.kernels.rope import kernel

    if torch.cuda.is_current_stream_capturing() or freqs.is_inference():
        return kernel.tables(freqs, dtype, mscale)
    key = (freqs._version, dtype, mscale, torch.cuda.current_stream(freqs.device).cuda_stream)
    kept = getattr(freqs, _NAME, None)
    if kept is None or kept[0] != key:
        kept = (key, kernel.tables(freqs, dtype, mscale))
        setattr(freqs, _NAME, kept)
    tables: tuple[torch.Tensor, torch.Tensor] = kept[1]
    return tables


class _RopeOnGpu(torch.autograd.Function):
    """`reference.Rope` by kernels."""

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        from te_overrides.kernels.rope import kernel

        ctx.save_for_backward(c, s)
        ctx.interleaved = interleaved
        return kernel.rotate(t, c, s, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from te_overrides.kernels.rope import kernel

        c, s = ctx.saved_tensors
        return kernel.rotate(grads[0], c, s, ctx.interleaved, transpose=True), None, None, None


@eager_only
def rope(
    t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False, mscale: float = 1.0
) -> torch.Tensor:
    """``t * cos + rotate_half(t) * sin`` over the first ``freqs.shape[-1]`` channels of `t`.

    Args:
        t: [s, ..., d] activations.
        freqs: [s, 1, 1, r] float32 angles in radians, r <= d; no gradient.
        interleaved: pairs are neighbours instead of halves.
        mscale: factor of cosine and sine.

    Raises:
        DeviceError: operands on several devices.
        RopeCoverageError: on a GPU, what the kernel does not cover.
    """
    if not on_gpu("RoPE", t=t, freqs=freqs):
        return Rope.apply(t, freqs, interleaved, mscale)  # type: ignore[no-any-return]
    c, s = _tables(freqs, t.dtype, mscale)
    return _RopeOnGpu.apply(t, c, s, interleaved)  # type: ignore[no-any-return]
