"""Gated MLP with the contract's stage boundaries: gate, up, silu * up and down are rounded one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP

from megatron_plugins.modules.guard import require_supported
from megatron_plugins.modules.linear import BiasAdd, DeterministicColumnParallelLinear
from patches.errors import NotCoveredError
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.swiglu.ops import SwiGLU


class DeterministicMLP(MLP):
    """Megatron's MLP; SwiGLU by the contract.

    Raises:
        NotCoveredError: an activation other than SwiGLU, clamped or offset gates.
    """

    def __init__(self, config: Any, submodules: Any, **kwargs: Any) -> None:
        require_supported(config, is_expert=bool(kwargs.get("is_expert", False)))
        clamp = getattr(config, "activation_func_clamp_value", None)
        offset = getattr(config, "glu_linear_offset", 0.0)
        if (
            not config.gated_linear_unit
            or config.activation_func is not F.silu
            or clamp is not None
            or offset
        ):
            raise NotCoveredError(
                f"gated_linear_unit={config.gated_linear_unit}, activation_func="
                f"{getattr(config.activation_func, '__name__', config.activation_func)}, activation_func_clamp_value="
                f"{clamp}, glu_linear_offset={offset}: the contract has a reference for SwiGLU alone. Pass --swiglu."
            )
        kwargs.setdefault("ffn_hidden_size", config.ffn_hidden_size)
        super().__init__(config, submodules, **kwargs)
        if not isinstance(self.linear_fc1, DeterministicColumnParallelLinear):
            raise NotCoveredError(
                f"linear_fc1 of a DeterministicMLP is {type(self.linear_fc1).__name__}; its input gradient needs the "
                "packed eight-lane contraction. Use DeterministicColumnParallelLinear in MLPSubmodules."
            )
        self.linear_fc1.gradient_segments = 2

    @eager_only
    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s(/TP), B, H] -> ([s(/TP), B, H], bias or None)."""
        if per_token_scale is not None:
            raise NotCoveredError(
                "per_token_scale was passed to a DeterministicMLP: it belongs to MoE experts."
            )
        packed, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            packed = BiasAdd.apply(packed, bias, self.linear_fc1.layout, False)
        out, output_bias = self.linear_fc2(SwiGLU.apply(packed))
        return out, output_bias
