"""The LSE merge of packed sequences, second half of every sequence, with the bits of the dense merge.

Upstream's is C++ (`tex.thd_second_half_lse_correction`): the library's log1pf and expf, contracted as the compiler
likes. A batch that is packed and the same batch that is not then differ, and on gfx950 neither agrees with the other's
compiled variants (ROCm/TransformerEngine#693). A Python patch of the dense functions does not reach it.

Seam: the ring looks the function up on the compiled module in every step (`tex.thd_…`, in no other file), so replacing
the attribute reaches every call. The compiled module is loaded around every finder (`load_framework_extension` calls
the loader itself), hence `after`. `cpp_extensions` has imported everything from it by then (`import *`), hence
`reexports`: nobody calls the function there, but an original held by value stops the job at the gate. The signature
is that of all releases from 2.3 to 2.20.2, read from the C++ declarations of their source distributions.

A build may lack the function: ROCm's fork had the packed ring behind `#ifndef USE_ROCM` where its source was read (1.9,
and a later commit of 2024). Such a build runs dense batches, and a packed ring there ends in an AttributeError, so the
override is NOT_REQUIRED and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.thd_second_half_lse_correction",
    target="transformer_engine_torch:thd_second_half_lse_correction",
    after="transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    kind="binding",
    reexports=("transformer_engine.pytorch.cpp_extensions",),
    absent="builds for ROCm may leave out the ring of packed sequences",
    modes=("stable", "invariant"),
    why="packed batches go through C++ with the library's log1p and exp, whose bits are not those of dense batches",
    how="the dense merge on the rows that the step holds, in place on the caller's tensor",
    retire_when="upstream's packed and dense merges give equal bits for every compilation",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.3",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from te_overrides.kernels.lse_merge.packed import thd_second_half_merge_lse_

    def thd_second_half_lse_correction(
        lse: Any, lse_per_step: Any, cu_seqlens: Any, lse_packed: bool
    ) -> None:
        thd_second_half_merge_lse_(lse, lse_per_step, cu_seqlens, lse_packed)

    return thd_second_half_lse_correction
