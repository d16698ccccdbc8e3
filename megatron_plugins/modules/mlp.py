"""MLP with the contract's stage boundaries: the first projection (gate and up), the activation and the second
projection are rounded one by one."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from megatron_plugins.modules.activation import activation_of
from megatron_plugins.modules.guard import require_supported
from megatron_plugins.modules.linear import BiasAdd, DeterministicColumnParallelLinear
from megatron_plugins.packed_order import of_batch
from patches.errors import NotCoveredError
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.swiglu.ops import SwiGLU


class DeterministicMLP(MLP):
    """Megatron's MLP, gated or plain.

    Raises:
        NotCoveredError: an activation without portable arithmetic, clamped or offset gates.
    """

    two_lane_gradient = False
    """dX of ``[gate; up]``: one contraction and one reduction, or (`TwoLaneMLP`) two of each."""

    def __init__(self, config: Any, submodules: Any, **kwargs: Any) -> None:
        require_supported(config, is_expert=bool(kwargs.get("is_expert", False)))
        activation = activation_of(config)
        kwargs.setdefault("ffn_hidden_size", config.ffn_hidden_size)
        super().__init__(config, submodules, **kwargs)
        self.activation = activation
        if not isinstance(self.linear_fc1, DeterministicColumnParallelLinear):
            raise NotCoveredError(
                f"linear_fc1 of a {type(self).__name__} is {type(self.linear_fc1).__name__}; its input gradient needs "
                "the packed eight-lane contraction. Use DeterministicColumnParallelLinear in MLPSubmodules."
            )
        self.linear_fc1.gradient_segments = 2 if config.gated_linear_unit else 1
        self.linear_fc1.two_lane_gradient = self.two_lane_gradient

    @eager_only
    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s(/TP), B, H] -> ([s(/TP), B, H], bias or None)."""
        if per_token_scale is not None:
            raise NotCoveredError(
                "per_token_scale was passed to a DeterministicMLP: it belongs to MoE experts."
            )
        if self.activation == SwiGLU.apply and self.linear_fc1.bias is None:
            out, output_bias = self.linear_fc2(self.linear_fc1.gated(hidden_states))
            return out, output_bias
        packed, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            packed = BiasAdd.apply(packed, bias, of_batch(self.linear_fc1.layout), False)
        out, output_bias = self.linear_fc2(self.activation(packed))
        return out, output_bias


class TwoLaneMLP(DeterministicMLP):
    """`DeterministicMLP` whose input gradient is reduced for gate and up separately, then added, gate first.

    Other bits than `DeterministicMLP`'s, the same in every layout: the form in which deterministic FFNs were published.
    """

    two_lane_gradient = True
