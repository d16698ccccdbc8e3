"""RoPE: cosine and sine that depend on the angle alone.

Upstream evaluates ``torch.cos(freqs)`` on the slice of positions that this rank holds. A vectorized cosine may take
another routine at the tail of a tensor than in its middle, and a compiler may fuse ``t * cos + rotated * sin`` into one
rounding. Both depend on shape and launch, hence on CP. The replacement is the same expression on portable cosine and
sine with three roundings.

Seam: ``_apply_rotary_pos_emb_bshd`` is looked up as a global of its module by the dense and the packed path alike, in
every version from 0.14 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import NotCoveredError


@override(
    id="megatron.rope",
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
    modes=("invariant",),
    why="cos and sin of a token's angle may differ with its place in the tensor, so bits change with CP",
    how="portable cos/sin in float64, rounded once; three separate roundings for the rotation",
    retire_when="upstream evaluates angles with a layout-independent cos/sin and does not fuse the rotation",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.kernels.eager import eager_only
    from te_overrides.kernels.rope.ops import rope

    @eager_only
    def _apply_rotary_pos_emb_bshd(
        t: Any,
        freqs: Any,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        if multi_latent_attention or kwargs.get("mla_rotary_interleaved"):
            raise NotCoveredError(
                "RoPE of multi-latent attention was called: its channel order is not part of the contract yet. "
                "Use grouped-query attention, or run without --deterministic-rocm."
            )
        return rope(t, freqs, rotary_interleaved, mscale)

    return _apply_rotary_pos_emb_bshd
