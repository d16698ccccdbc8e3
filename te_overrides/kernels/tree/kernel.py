"""`reference.py`'s balanced tree as a Triton device function.

A reduction over a whole axis adds in an order that follows the layout: registers of a thread, then lanes, then warps,
each in whatever sequence the compiler picks. Over an axis of two there is one addition, and x + y is y + x: so every
level of the tree is a sum over pairs of neighbours, and no layout, number of warps or compiler can change a bracket.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _plus(x, y):
    # Not `tl.sum`: Triton's interpreter has numpy begin that at +0, and -0 + -0 is -0.
    return x + y


@triton.jit
def tree_of_rows(x, LEVELS: tl.constexpr):
    """[R, 2^LEVELS] -> [R]. Fewer columns than that: fill with -0.0, the one number that changes no sum."""
    ROWS: tl.constexpr = x.shape[0]
    for _ in tl.static_range(LEVELS):
        x = tl.reduce(tl.reshape(x, [ROWS, x.shape[1] // 2, 2]), 2, _plus)
    return tl.reshape(x, [ROWS])
