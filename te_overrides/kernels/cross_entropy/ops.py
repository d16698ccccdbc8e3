"""Vocabulary-parallel log-probability and loss with autograd: reference on a CPU, kernels of the same bits on a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives.transport import group_rank
from te_overrides.kernels.cross_entropy import reference
from te_overrides.kernels.devices import on_gpu
from te_overrides.kernels.eager import eager_only


class _OnDevice(torch.autograd.Function):
    """The kernels; saves the logits as they came and two numbers a row."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup | None,
        valid: int | None,
        negate: bool,
    ) -> torch.Tensor:
        from te_overrides.kernels.cross_entropy import kernel

        out, peak, total = kernel.log_prob(logits, target, group, valid, negate)
        ctx.save_for_backward(logits, target, peak, total)
        ctx.rest = (group_rank(group), valid, negate)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        from te_overrides.kernels.cross_entropy import kernel

        saved, rest = ctx.saved_tensors, ctx.rest  # type: ignore[attr-defined]
        return kernel.log_prob_backward(grads[0], *saved, *rest), None, None, None, None


def _on_gpu(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the kernels take it.

    Raises:
        DeviceError: operands on several devices.
        ValueError: targets that are not int64, or not one a row.
    """
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"vocabulary loss: logits are {logits.dtype} {tuple(logits.shape)}, targets {target.dtype} "
            f"{tuple(target.shape)}; int64 targets, one a row, are needed"
        )
    return on_gpu("vocabulary loss", logits=logits, target=target)


@eager_only
def vocab_parallel_log_prob(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    valid: int | None = None,
) -> torch.Tensor:
    """Log-probability of `target`, [...] float32; see `reference.VocabParallelLogProb`."""
    if not _on_gpu(logits, target):
        return reference.vocab_parallel_log_prob(logits, target, group, valid)
    return _OnDevice.apply(logits, target, group, valid, False)  # type: ignore[no-any-return,no-untyped-call]


@eager_only
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    valid: int | None = None,
) -> torch.Tensor:
    """``-log_prob``: the loss of each token, [...] float32."""
    if not _on_gpu(logits, target):
        return reference.vocab_parallel_cross_entropy(logits, target, group, valid)
    return _OnDevice.apply(logits, target, group, valid, True)  # type: ignore[no-any-return,no-untyped-call]
