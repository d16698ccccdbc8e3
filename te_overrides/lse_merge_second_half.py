"""The log-sum-exp merge for the second half of a causal sequence (`te_overrides/lse_merge.py` argues it).

The caller passes a view [..., 2, s/2] of its accumulator and the step's [..., s/2]; the first half is not touched.

Seam: a global of the module that the ring runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from te_overrides.mended import native_lse_correction


@override(
    id="te.lse_merge_second_half",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:flash_attn_fwd_second_half_softmax_lse_correction",
    modes=("stable", "invariant"),
    why="torch.compile keeps several variants of the merge in one process and they differ in the last bit",
    how="the portable merge on the [..., 1, :] view of the caller's tensor",
    retire_when="upstream's correction functions give equal bits for every compilation (ROCm/TransformerEngine#693)",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.3",
    mended=lambda module: native_lse_correction(module, "flash_attn_fwd_second_half_softmax_lse_correction"),
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from te_overrides.kernels.lse_merge.ops import merge_second_half_lse_

    def flash_attn_fwd_second_half_softmax_lse_correction(
        softmax_lse: Any, softmax_lse_per_step: Any
    ) -> None:
        merge_second_half_lse_(softmax_lse, softmax_lse_per_step)

    return flash_attn_fwd_second_half_softmax_lse_correction
