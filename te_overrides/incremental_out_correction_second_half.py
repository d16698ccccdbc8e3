"""The incremental output correction for the second half of a causal sequence, in TransformerEngine from 2.20.

`out` has its sequence dimension split in (2, s/2) and only the second part is written;
`te_overrides/incremental_out_correction.py` argues the rest.

Seam: a global of the module that the ring runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.incremental_out_correction_second_half",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:flash_attn_fwd_incremental_second_half_out_correction",
    modes=("stable", "invariant"),
    why="the compiled exp, product and sum of an output correction round differently from variant to variant",
    how="the portable incremental correction on the second half of the caller's tensor",
    retire_when="upstream's correction functions give equal bits for every compilation (ROCm/TransformerEngine#693)",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.20",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from te_overrides.kernels.lse_merge.ops import incremental_second_half_out_correction_

    def flash_attn_fwd_incremental_second_half_out_correction(
        out: Any,
        out_per_step: Any,
        old_softmax_lse: Any,
        new_softmax_lse: Any,
        softmax_lse_per_step: Any,
        seq_dim: int,
    ) -> None:
        incremental_second_half_out_correction_(
            out, out_per_step, old_softmax_lse, new_softmax_lse, softmax_lse_per_step, seq_dim
        )

    return flash_attn_fwd_incremental_second_half_out_correction
