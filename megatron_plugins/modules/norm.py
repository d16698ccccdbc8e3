"""RMSNorm as a Megatron norm: rows by the contract, the weight's gradient by granules.

Two uses differ in how their gradient is shared: a norm over the hidden size sees all tokens of a rank (a share of them
under sequence parallelism, where Megatron sums the gradient over TP afterwards); a q/k-norm sees the heads of this
rank's KV groups (Megatron always sums its gradient over TP).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_plugins.modules import norm_ahead
from megatron_plugins.modules.guard import require_supported
from megatron_plugins.modules.norm_functions import NormTerms, rms_norm
from megatron_plugins.packed_order import of_batch
from megatron_plugins.parallel_layout import layout_of
from te_overrides.kernels.eager import eager_only


def normalize(x: torch.Tensor, terms: NormTerms) -> torch.Tensor:
    """RMSNorm of [s, B, H]: what the residual add before it has computed already, or computed here."""
    normed = norm_ahead.take(x, terms)
    return rms_norm(x, terms) if normed is None else normed


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

    def norm_terms(self) -> NormTerms:
        """What this norm computes with."""
        return NormTerms(self.weight, self.eps, self.zero_centered, of_batch(self.layout))

    @eager_only
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> the same shape and dtype."""
        return normalize(x, self.norm_terms())

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"


class _HeadRMSNorm(DeterministicRMSNorm):
    """RMSNorm over head_dim of [s, B, heads, d]: granules carry the KV group as well."""

    @eager_only
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, B, heads, d] -> the same shape and dtype."""
        groups = self.config.num_query_groups or self.config.num_attention_heads
        return rms_norm(x, self.norm_terms(), int(groups // self.layout.tp_size))


class DeterministicQKNorm:
    """q/k-norm of the layer spec: an identity unless ``config.qk_layernorm``. One spec object serves both models."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
        if not config.qk_layernorm:
            return IdentityOp()  # type: ignore[no-any-return]
        return _HeadRMSNorm(config=config, hidden_size=hidden_size, eps=eps, **kwargs)
