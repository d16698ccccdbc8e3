"""The gradient norm as an exact sum of squares: independent of how gradients are sharded (docs/numbers.md, "Rows").

The square of a float32 is exact in float64. Its significand, cut into two halves, is added into an int64 bin of its
exponent. Integer addition has no order, so bins may be filled in any sharding and summed over ranks by any
collective; only the last step rounds: a Python integer, its square root correctly rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from te_overrides.kernels.eager import eager_only

_LOWEST = -298  # exponent of the square of the smallest float32 subnormal
_BINS = 2 * 128 - _LOWEST + 1
_HALF = 27
_PART = 1 << 24  # elements at a time: what is made of one takes 60 bytes


class NonFiniteError(ArithmeticError):
    """A gradient holds NaN or infinity: there is no norm to speak of."""


@eager_only
def square_bins(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Bins of the exact sum of squares. Returns int64 [_BINS, 2]; add bins of several ranks with integer addition.

    Holds up to 2**35 elements a bin without overflow.

    Raises:
        NonFiniteError: a tensor holds NaN or infinity.
    """
    bins = torch.zeros(_BINS, 2, dtype=torch.int64)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(_PART):
            x = part.to(torch.float32).to(torch.float64)
            if not bool(torch.isfinite(x).all()):
                raise NonFiniteError("the gradient norm was asked for, but a gradient holds NaN or infinity")
            significand, exponent = torch.frexp(torch.mul(x, x))
            whole = torch.mul(significand, float(2**53)).to(
                torch.int64
            )  # exact: significand has 48 bits at most
            index = torch.where(whole == 0, torch.zeros_like(exponent), exponent - _LOWEST).to(torch.int64)
            halves = torch.stack([whole >> _HALF, whole & (2**_HALF - 1)], dim=1)
            # Where the gradient lies: integer additions give the same bins in any order.
            here = torch.zeros(_BINS, 2, dtype=torch.int64, device=x.device)
            bins += here.index_add_(0, index, halves).cpu()
    return bins


def sum_of_squares(bins: torch.Tensor) -> tuple[int, int]:
    """``(numerator, exponent)``: the exact sum of squares is ``numerator * 2**exponent``."""
    total = 0
    for i, (high, low) in enumerate(bins.tolist()):
        total += ((high << _HALF) + low) << i
    return total, _LOWEST - 53


def norm_from_bins(bins: torch.Tensor) -> float:
    """The square root of the exact sum, correctly rounded to float64 (round half to even)."""
    total, exponent = sum_of_squares(bins)
    if total == 0:
        return 0.0
    # Enough extra bits that isqrt leaves 64 significant ones; a sticky bit keeps the rounding honest.
    shift = max(0, 140 - total.bit_length())
    shift += (exponent - shift) % 2
    scaled = total << shift
    root = math.isqrt(scaled)
    sticky = int(root * root != scaled)
    # int -> float rounds half to even; the power of two is exact.
    return math.ldexp(float((root << 1) | sticky), (exponent - shift) // 2 - 1)
