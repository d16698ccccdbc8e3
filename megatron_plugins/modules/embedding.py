"""Vocabulary-parallel embedding: lookup exact, gradient a chain over tokens instead of atomics."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from megatron_plugins.collectives.ownership import embedding_weight_gradient, gather_tokens, sum_over_tp
from megatron_plugins.modules.gradient_accumulation import deliver
from megatron_plugins.packed_order import of_batch
from megatron_plugins.parallel_layout import ParallelLayout
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.embedding.ops import lookup


class _Lookup(torch.autograd.Function):
    """ids [B, s] -> [B, s, C], or [s / TP, B, C] when scattered to the sequence-parallel region."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        first_row: int,
        scatter: bool,
        layout: ParallelLayout,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.first_row, ctx.scatter, ctx.layout = first_row, scatter, layout
        rows = lookup(ids.transpose(0, 1).contiguous() if scatter else ids, weight, first_row)
        return sum_over_tp(rows, layout, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        grad = gather_tokens(grads[0].contiguous(), ctx.layout) if ctx.scatter else grads[0].transpose(0, 1)
        total = embedding_weight_gradient(ids, grad, weight.shape[0], ctx.first_row, ctx.layout)
        return None, deliver(weight, total, fused=False), None, None, None


class DeterministicVocabParallelEmbedding(VocabParallelEmbedding):
    """Megatron's VocabParallelEmbedding; same parameters and checkpoints. Takes over upstream instances."""

    layout: ParallelLayout

    @eager_only
    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """input_ [B, s] token ids -> [B, s, C], or [s / TP, B, C] with ``reduce_scatter_embeddings``."""
        scatter = bool(self.reduce_scatter_embeddings)
        layout = of_batch(self.layout)
        out: torch.Tensor = _Lookup.apply(input_, self.weight, self.vocab_start_index, scatter, layout)
        return out
