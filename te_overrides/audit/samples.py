"""Inputs for the numeric engine, and the counts it reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit.compile import Kernel

__all__ = ["Difference", "Errors", "count_differences", "count_errors", "uniform_inputs"]

_DTYPES = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "i32": np.int32, "i64": np.int64,
           "i8": np.int8, "i16": np.int16, "bf16": np.uint16, "i1": np.bool_, "u8": np.uint8}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Between two results: elements whose bits differ (NaN equals NaN), of how many, largest distance."""

    differing: int
    total: int
    max_abs: float


@dataclass(frozen=True)
class Errors:
    """Against a float64 reference, in units of float32's epsilon relative to it, as the published counts are."""

    mean_ulp: float
    max_ulp: float


def uniform_inputs(
    kernel: Kernel, elements: int, seed: int = 0, low: float = 0.0, high: float = 1.0
) -> dict[str, NDArray]:
    """Uniform numbers in [low, high) for every floating-point pointer argument, zeros for integer ones."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, NDArray] = {}
    for name in kernel.pointers:
        kind = kernel.signature[name].lstrip("*")
        count = elements * kernel.sizes.get(name, 1)
        if kind == "bf16":
            drawn = generator.uniform(low, high, count).astype(np.float32)
            arrays[name] = (drawn.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        elif kind.startswith("fp"):
            # float32 draws: rounding a float64 one could give `high` itself.
            drawn = generator.random(count, np.float32).astype(np.float64) * (high - low) + low
            arrays[name] = drawn.astype(_DTYPES[kind])
        else:
            arrays[name] = np.zeros(count, _DTYPES[kind])
    return arrays


def count_differences(left: NDArray, right: NDArray) -> Difference:
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64, 1: np.uint8}[left.dtype.itemsize]
    differ = left.view(bits) != right.view(bits)
    if left.dtype.kind == "f":
        differ &= ~(np.isnan(left) & np.isnan(right))
    with np.errstate(all="ignore"):
        distance = np.abs(left[differ].astype(np.float64) - right[differ].astype(np.float64))
    return Difference(int(differ.sum()), left.size, float(distance.max()) if distance.size else 0.0)


def count_errors(got: NDArray, want: NDArray[np.float64]) -> Errors:
    """Mean and maximum error where the reference is finite and not zero."""
    with np.errstate(all="ignore"):
        ulps = np.abs(got.astype(np.float64) - want) / (np.finfo(np.float32).eps * np.abs(want))
    ulps = ulps[np.isfinite(ulps)]
    return Errors(float(ulps.mean()), float(ulps.max())) if ulps.size else Errors(0.0, 0.0)
