"""Which attention core a process computes with: one, from its first call to its last.

Two cores have bits of two classes. A run that takes one for prefill and the other for training, or changes between
layers, would be reproducible and still compare what is not comparable.
"""

from __future__ import annotations

from te_overrides.kernels.attention.reference import AttentionError

OURS, AITER = "this project's kernels", "AITER's kernels"

_in_use: str | None = None


def claim(core: str) -> None:
    """Say that `core` is about to compute.

    Raises:
        AttentionError: another one has computed in this process.
    """
    global _in_use
    if _in_use is None:
        _in_use = core
    elif _in_use != core:
        raise AttentionError(
            f"attention is about to run on {core}, but has run on {_in_use} in this process: their bits are of two "
            "classes, and one run takes one of them. Build every layer with one layer spec."
        )
