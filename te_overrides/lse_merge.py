"""The log-sum-exp merge of ring attention, in place, with one answer for every compilation.

Upstream's function is `@jit_fuser`: Dynamo keeps several compiled variants of it in one process, which on gfx950 differ
in the last bit of log1p, and past its recompile limit it drops to eager without a word. A reference model and an actor
of one RL process then disagree before the first step (ROCm/TransformerEngine#693).

Seam: the ring looks the function up as a global of its module, so replacing the attribute reaches every call. It is not
called without context parallelism, nor by the all-gather and all-to-all runtimes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from te_overrides.mended import native_lse_correction


@override(
    id="te.lse_merge",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:flash_attn_fwd_softmax_lse_correction",
    modes=("stable", "invariant"),
    why="torch.compile keeps several variants of the merge in one process and they differ in the last bit",
    how="portable exp and log1p in float64, rounded once to the accumulator, in place on the caller's tensor",
    retire_when="upstream's correction functions give equal bits for every compilation (ROCm/TransformerEngine#693)",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.3",
    mended=lambda module: native_lse_correction(module, "flash_attn_fwd_softmax_lse_correction"),
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from te_overrides.kernels.lse_merge.ops import merge_lse_

    def flash_attn_fwd_softmax_lse_correction(softmax_lse: Any, softmax_lse_per_step: Any) -> None:
        merge_lse_(softmax_lse, softmax_lse_per_step)

    return flash_attn_fwd_softmax_lse_correction
