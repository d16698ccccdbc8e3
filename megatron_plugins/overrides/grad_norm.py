"""The gradient norm as an exact sum of squares.

Upstream squares and sums per rank (apex's multi-tensor kernel, or a loop of torch norms), then all-reduces: the
brackets follow the sharding, and the norm scales every update through the clip coefficient. An exact sum has no
brackets: the squares go into integer bins, integers are added over ranks, one rounding at the end.

Seam: ``get_grad_norm_fp32`` in its defining module; ``optimizer.py`` imports it by name after that module has executed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import NotCoveredError


@override(
    id="megatron.grad_norm",
    target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
    modes=("invariant",),
    why="the gradient norm depends on how gradients are sharded, and it scales every update",
    how="exact sum of squares in integer bins, summed over ranks as integers, square root rounded once",
    retire_when="upstream's norm does not depend on the sharding",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.kernels.devices import device_of_group
    from te_overrides.kernels.grad_norm.reference import NonFiniteError, norm_from_bins, square_bins

    @functools.wraps(original)
    def get_grad_norm_fp32(
        grads_for_norm: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None
    ) -> Any:
        if float(norm_type) == float("inf"):
            # A maximum is exact in any order.
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        if float(norm_type) != 2.0:
            raise NotCoveredError(
                f"a gradient norm of order {norm_type} was asked for: the contract defines orders 2 and inf. "
                "Clip by the 2-norm."
            )
        import torch

        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
        if any(type(grad).__name__ == "DTensor" for grad in grads):
            raise NotCoveredError(
                "a DTensor gradient reached the gradient norm (FSDP): its sharding is not part of the contract yet. "
                "Use Megatron's DistributedDataParallel."
            )
        try:
            bins = square_bins(grads)
            finite = torch.ones(1, dtype=torch.int64)
        except NonFiniteError:
            # Every rank must take part in the reduction and see the same outcome.
            bins, finite = square_bins([]), torch.zeros(1, dtype=torch.int64)
        payload = torch.cat([bins.reshape(-1), finite - 1])
        if torch.distributed.is_initialized():
            # Of the group, not of the gradients: those may be offloaded, or on a GPU beside a group over gloo.
            payload = payload.to(device_of_group(grad_stats_parallel_group))
            torch.distributed.all_reduce(payload, group=grad_stats_parallel_group)
            payload = payload.cpu()
        if int(payload[-1]) != 0:
            return float("nan")
        return norm_from_bins(payload[:-1].view(bins.shape))

    return get_grad_norm_fp32
