"""Averaging a per-token loss in an order that no layout enters."""

from __future__ import annotations

import torch

from megatron_plugins.parallel_layout import ParallelLayout, canonical_tokens
from te_overrides.kernels.collectives.transport import all_gather
from te_overrides.kernels.tree.reference import balanced_tree_dim


def gather_sequence(x: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
    """[B, s] of every context-parallel rank to [B, S] in position order. No gradient."""
    parts = all_gather(x.detach().transpose(0, 1).contiguous(), layout.cp_group)
    return layout.canonical(parts).transpose(0, 1)


def mean_loss(per_token: torch.Tensor, mask: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
    """Masked mean over all tokens of the micro-batch: the value to report, equal on every rank and in every layout.

    Args:
        per_token: [B, s] float32, this rank's positions.
        mask: [B, s], 1 for tokens that count.
        layout: the model's, of a deterministic module; for packed sequences under context parallelism with their
            boundaries: ``dataclasses.replace(layout, cu_seqlens=…)``.

    Returns:
        0-d float32: balanced tree over tokens in canonical order, divided in float64, rounded once. NaN if no token
        counts.
    """
    # A masked token's loss may be anything, NaN included: select, do not multiply.
    kept = torch.where(
        mask.bool(), per_token.to(torch.float32), torch.zeros_like(per_token, dtype=torch.float32)
    )
    losses = canonical_tokens(gather_sequence(kept, layout).transpose(0, 1).unsqueeze(-1)).squeeze(-1)
    tokens = gather_sequence(mask.to(torch.float32), layout).bool().sum()
    return torch.div(balanced_tree_dim(losses, 0).to(torch.float64), tokens.to(torch.float64)).to(
        torch.float32
    )
