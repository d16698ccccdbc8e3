"""Adding one step's weighted output to the accumulated one, in TransformerEngine up to 2.19.

Upstream's exp, product and sum are compiled together: eager rounds the product, a fused kernel may not.

Seam: a global of the module that the ring runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.out_correction",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:flash_attn_fwd_out_correction",
    modes=("stable", "invariant"),
    why="the compiled exp, product and sum of an output correction round differently from variant to variant",
    how="portable exp rounded once to a weight, one rounding each for product and sum, in place",
    retire_when="upstream's correction functions give equal bits for every compilation (ROCm/TransformerEngine#693)",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.3,<2.20",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from te_overrides.kernels.lse_merge.ops import out_correction_

    def flash_attn_fwd_out_correction(
        out: Any, out_per_step: Any, softmax_lse: Any, softmax_lse_per_step: Any, seq_dim: int
    ) -> None:
        out_correction_(out, out_per_step, softmax_lse, softmax_lse_per_step, seq_dim)

    return flash_attn_fwd_out_correction
