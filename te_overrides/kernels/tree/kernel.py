"""`reference.py`'s balanced tree as a Triton device function.

A reduction over a whole axis adds in an order that follows the layout: registers of a thread, then lanes, then warps,
each in whatever sequence the compiler picks. Over an axis of two there is one addition, and x + y is y + x: so every
level of the tree is a sum over pairs of neighbours, and no layout, number of warps or compiler can change a bracket.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.rounding.kernel import rounded


@triton.jit
def _plus(x, y):
    # Not `tl.sum`: Triton's interpreter has numpy begin that at +0, and -0 + -0 is -0.
    return x + y


@triton.jit
def tree_of_rows(x, LEVELS: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """[R, 2^LEVELS] float32 -> [R]. Fewer columns than that: fill with -0.0, the one number that changes no sum.

    DTYPE: a 16-bit dtype that the terms came from, and to which every sum is rounded. float32 has more than twice its
    bits and two more, so the addition and this rounding are one.
    """
    ROWS: tl.constexpr = x.shape[0]
    for _ in tl.static_range(LEVELS):
        x = tl.reduce(tl.reshape(x, [ROWS, x.shape[1] // 2, 2]), 2, _plus)
        if DTYPE != tl.float32:
            x = rounded(x, DTYPE).to(tl.float32)
    return tl.reshape(x, [ROWS])
