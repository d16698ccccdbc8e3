"""Bitwise assertions for tests; the counting itself is `te_overrides.kernels.bits`."""

from __future__ import annotations

import torch

from te_overrides.kernels.bits import count_mismatches

__all__ = ["assert_equal_bits", "count_mismatches"]


def assert_equal_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Assert that two tensors have the same bits (NaN equals NaN, -0.0 differs from +0.0).

    Args:
        got, want: tensors of one shape and dtype.
        what: names the compared thing in the message, e.g. "dQ, head 3, CP=2 against CP=1".

    Raises:
        AssertionError: elements differ (says how many of how many and the first), or shape or dtype does.
    """
    __tracebackhide__ = True
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}")
    if got.dtype != want.dtype:
        raise AssertionError(f"{what}: dtype {got.dtype}, want {want.dtype}")
    mismatched, total, first = count_mismatches(got, want)
    if first is not None:
        raise AssertionError(
            f"{what}: {mismatched} of {total} elements differ, first at {first}: "
            f"got {got[first].item()!r}, want {want[first].item()!r}"
        )
