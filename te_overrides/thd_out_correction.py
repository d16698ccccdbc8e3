"""The output correction of packed sequences, with the bits of the dense correction.

Upstream's is C++ (`tex.thd_out_correction`), for the reasons and with the seam of `thd_second_half_lse_correction.py`.
Up to 2.19 it adds a step's output weighted by the final LSE (seven parameters); from 2.20 on it rescales the
accumulated output as well and takes the old LSE before the new one (eight parameters). Which of the two is installed
is read from the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import DriftError


@override(
    id="te.thd_out_correction",
    target="transformer_engine_torch:thd_out_correction",
    after="transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    kind="binding",
    reexports=("transformer_engine.pytorch.cpp_extensions",),
    absent="builds for ROCm may leave out the ring of packed sequences",
    modes=("stable", "invariant"),
    why="packed batches go through C++ with the library's exp, whose bits are not those of dense batches",
    how="the dense correction on the rows that the step holds, in place on the caller's tensor",
    retire_when="upstream's packed and dense corrections give equal bits for every compilation",
    evidence="docs/evidence/lse-merge.md",
    distribution="transformer-engine",
    versions=">=2.3",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from patches import binding
    from te_overrides.kernels.lse_merge import packed

    forms = {7: packed.thd_out_correction_, 8: packed.thd_incremental_out_correction_}
    count = binding.parameters(binding.of_function(original) or "")
    if count not in forms:
        raise DriftError(
            f"override te.thd_out_correction: sought a function of 7 or 8 parameters, found {count}. Install a release "
            "that was reviewed (`python -m patches explain te.thd_out_correction`), or run without "
            "--deterministic-rocm."
        )
    correct = forms[count]

    def thd_out_correction(*arguments: Any) -> None:
        correct(*arguments)

    return thd_out_correction
