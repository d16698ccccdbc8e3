"""RMSNorm as a Megatron norm: rows by the contract, the weight's gradient by granules.

Two uses differ in how their gradient is shared: a norm over the hidden size sees all tokens of a rank (a share of them
under sequence parallelism, where Megatron sums the gradient over TP afterwards); a q/k-norm sees the heads of this
rank's KV groups (Megatron always sums its gradient over TP).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_plugins.collectives.ownership import check_granules, vector_gradient
from megatron_plugins.modules.gradient_accumulation import deliver
from megatron_plugins.modules.guard import require_supported
from megatron_plugins.parallel_layout import ParallelLayout, layout_of
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.rmsnorm.ops import rmsnorm, rmsnorm_backward_partials


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool, layout: ParallelLayout,
        groups: int | None,
    ) -> torch.Tensor:  # fmt: skip
        y, rstd = rmsnorm(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered, ctx.layout, ctx.groups = zero_centered, layout, groups
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        layout: ParallelLayout = ctx.layout
        over_heads = ctx.groups is not None
        tokens_over_tp = layout.sequence_parallel and not over_heads
        if ctx.needs_input_grad[1]:
            check_granules(x.shape[0], layout, tokens_over_tp=tokens_over_tp)
        # One pass over the rows leaves both; a frozen weight's partials are dropped.
        dx, partials = rmsnorm_backward_partials(grads[0], x, weight, rstd, ctx.zero_centered, ctx.groups)
        dweight = None
        if ctx.needs_input_grad[1]:
            total = vector_gradient(partials, layout, tokens_over_tp=tokens_over_tp, heads_over_tp=over_heads)
            dweight = deliver(weight, total, fused=False)
        return dx, dweight, None, None, None, None


def rmsnorm_of(x: torch.Tensor, weight: torch.Tensor, config: Any, layout: ParallelLayout) -> torch.Tensor:
    """RMSNorm of [s, B, H] by a weight that another module holds."""
    zero_centered = bool(config.layernorm_zero_centered_gamma)
    return _RMSNorm.apply(x, weight, config.layernorm_epsilon, zero_centered, layout, None)  # type: ignore[no-any-return]


class DeterministicRMSNorm(torch.nn.Module):
    """RMSNorm over the hidden size. Built as Megatron builds norms: ``(config, hidden_size, eps)``.

    Raises:
        NotCoveredError: another normalization, or a configuration that the contract does not cover.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        require_supported(config)
        self.config, self.hidden_size, self.eps = config, hidden_size, eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        self.layout = layout_of(config)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        fill = 0.0 if self.zero_centered else 1.0
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), fill, dtype=config.params_dtype, device=device)
        )
        # Megatron sums gradients of parameters with this mark over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _groups(self) -> int | None:
        return None

    @eager_only
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> the same shape and dtype."""
        return _RMSNorm.apply(x, self.weight, self.eps, self.zero_centered, self.layout, self._groups())  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"


class _HeadRMSNorm(DeterministicRMSNorm):
    """RMSNorm over head_dim of [s, B, heads, d]: granules carry the KV group as well."""

    def _groups(self) -> int:
        groups = self.config.num_query_groups or self.config.num_attention_heads
        return int(groups // self.layout.tp_size)


class DeterministicQKNorm:
    """q/k-norm of the layer spec: an identity unless ``config.qk_layernorm``. One spec object serves both models."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
        if not config.qk_layernorm:
            return IdentityOp()  # type: ignore[no-any-return]
        return _HeadRMSNorm(config=config, hidden_size=hidden_size, eps=eps, **kwargs)
