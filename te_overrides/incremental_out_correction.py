"""Rescaling the accumulated output and adding one step's, in TransformerEngine from 2.20.

2.20 merges inside the ring's loop (`mul_`, then `addcmul_`) where earlier versions corrected once at the end, so ring
bits differ between 2.19 and 2.20 by upstream's design; within a version they must not. Upstream rounds a bf16
accumulator after the product as well; here the step is evaluated in float32 and rounded once.

Seam: a global of the module that the ring runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.incremental_out_correction",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:flash_attn_fwd_incremental_out_correction",
    modes=("stable", "invariant"),
    why="the compiled exp, product and sum of an output correction round differently from variant to variant",
    how="portable weights for the old and the new part, one rounding per product and sum, in place",
    retire_when="upstream's correction functions give equal bits for every compilation (ROCm/TransformerEngine#693)",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.20",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from te_overrides.kernels.lse_merge.ops import incremental_out_correction_

    def flash_attn_fwd_incremental_out_correction(
        out: Any,
        out_per_step: Any,
        old_softmax_lse: Any,
        new_softmax_lse: Any,
        softmax_lse_per_step: Any,
        seq_dim: int,
    ) -> None:
        incremental_out_correction_(
            out, out_per_step, old_softmax_lse, new_softmax_lse, softmax_lse_per_step, seq_dim
        )

    return flash_attn_fwd_incremental_out_correction
