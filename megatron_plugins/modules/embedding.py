"""Vocabulary-parallel embedding: lookup exact, gradient a chain over tokens instead of atomics."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from megatron_plugins.collectives.ownership import embedding_weight_gradient, gather_tokens, sum_over_tp
from megatron_plugins.modules.gradient_accumulation import deliver
from megatron_plugins.parallel_layout import ParallelLayout
from te_overrides.kernels.eager import eager_only


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
        place = ids - first_row
        here = (place >= 0) & (place < weight.shape[0])
        rows = weight[place.clamp(0, weight.shape[0] - 1)]
        # One rank contributes a row, the others +0; `+ 0.0` gives the one-rank case the same zero.
        rows = torch.add(torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows)), 0.0)
        return sum_over_tp(rows.transpose(0, 1).contiguous() if scatter else rows, layout, scatter)

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
        out: torch.Tensor = _Lookup.apply(input_, self.weight, self.vocab_start_index, scatter, self.layout)
        return out
