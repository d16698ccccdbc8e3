"""Core attention on AITER's kernels: the same bits at every layout, others than those of this project's kernels.

Selected by its layer spec alone, for a whole model. `te_overrides/kernels/attention/aiter.py` holds the argument,
`megatron_plugins/aiter_operators.py` the guards. Pages and packed sequences are refused; inference runs with this
project's kernels, in a run of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_plugins.aiter_operators import operators
from megatron_plugins.modules.core_attention import DeterministicCoreAttention
from patches.errors import NotCoveredError
from te_overrides.kernels.attention.aiter import aiter_attention


class AiterCoreAttention(DeterministicCoreAttention):
    """Megatron's core-attention interface on one AITER launch a key head and batch row."""

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        return aiter_attention(
            query,
            key,
            value,
            operators=operators,
            cp_group=self.layout.cp_group,
            layout=self.layout.cp_layout,
            causal=causal,
            softmax_scale=self.softmax_scale,
            window=self.window,
        )[0]

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
        raise NotCoveredError(
            "packed sequences reached the AITER attention core, which covers padded [b, s] batches. Pass those, or "
            "build the model with deterministic_gpt_layer_spec."
        )

    def paged_kv_refusal(self, causal: bool | None = None) -> str | None:
        return "the AITER attention core has no reading of a cache with the bits of its training forward"
