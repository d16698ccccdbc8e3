"""AITER's add and RMSNorm with dynamicquant: see `aiter_quantized.py`.

Seam: a function of AITER's Python module that its package re-exports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from te_overrides import aiter_quantized


@override(
    id="aiter.rmsnorm2d_fwd_with_add_dynamicquant",
    target="aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add_dynamicquant",
    modes=("invariant",),
    why="residual_out is truncated to bfloat16 on gfx942, and a quantized result has no reference in the contract",
    how="refused by name; mode stable leaves it alone and shows its bias",
    retire_when="AITER rounds residual_out, and the contract covers quantized activations (ROCm/aiter#5151)",
    evidence="docs/evidence/add-rmsnorm.md",
    distribution="amd-aiter",
    versions=">=0.1.2",
    biased=aiter_quantized.BIASED,
)
def build(_original: Callable[..., Any]) -> Callable[..., Any]:
    return aiter_quantized.refuse("rmsnorm2d_fwd_with_add_dynamicquant")
