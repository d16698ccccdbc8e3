"""The first step's output weighted by the final log-sum-exp, in TransformerEngine up to 2.19.

The weight is an exp and the product is contracted into the neighbouring sum wherever a compiler likes to; both are
fixed here (`te_overrides/kernels/lse_merge/reference.py`).

Seam: a global of the module that the ring runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.out_correction_init",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:flash_attn_fwd_out_correction_init",
    modes=("stable", "invariant"),
    why="the compiled exp, product and sum of an output correction round differently from variant to variant",
    how="portable exp rounded once to a weight, one rounding for the product, one to the output's dtype",
    retire_when="upstream's correction functions give equal bits for every compilation (ROCm/TransformerEngine#693)",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.3,<2.20",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.kernels.lse_merge.ops import out_correction_init

    def flash_attn_fwd_out_correction_init(
        out_init_step: Any, softmax_lse: Any, softmax_lse_init_step: Any, seq_dim: int
    ) -> Any:
        return out_correction_init(out_init_step, softmax_lse, softmax_lse_init_step, seq_dim)

    return flash_attn_fwd_out_correction_init
