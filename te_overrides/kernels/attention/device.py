"""Device functions that the attention kernels share.

Nothing here is chosen by the launch. exp2 is one hardware instruction on both vendors (`ex2.approx.ftz.f32`,
`v_exp_f32`), which is a function of its input and of nothing else; the compiler emits it bare, and on AMD with the wait
state that its result needs and that inline assembly would lack. What is rounded once is written as `tl.fma`, so that no
contraction is left to the compiler (`enable_fp_fusion=False`).
"""

import triton
import triton.language as tl

from te_overrides.kernels.portable_math.kernel import log_of_normal_f64

_INF = tl.constexpr(float("inf"))
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def positive_zero(x):
    """A value already rounded to its last dtype, -0.0 made +0.0."""
    return tl.where(x == 0.0, 0.0, x).to(x.dtype)


@triton.jit
def softmax_step(s, row_max, row_sum, scale):
    """One tile of scores [BM, BN] (float32, unscaled, hidden ones -inf) meets a row's running maximum and sum.

    Returns p [BM, BN], the new maximum and sum, and alpha [BM], what the accumulator is multiplied with. A row that has
    met only scores of -inf keeps everything: its shift is 0, so p is +0 and alpha multiplies zeros.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    shift = tl.where(new_max == -_INF, 0.0, new_max)
    p = tl.math.exp2(tl.fma(s, scale, -shift[:, None]))
    alpha = tl.math.exp2(row_max - shift)
    return p, new_max, tl.fma(row_sum, alpha, tl.sum(p, 1)), alpha


@triton.jit
def inverse_of(row_sum):
    """1 / sum, evaluated in float64 and rounded to float32; 0 for a row without keys."""
    inverse = (1.0 / row_sum.to(tl.float64)).to(tl.float32)
    return tl.where(row_sum == 0.0, 0.0, inverse)


@triton.jit
def lse_of(row_max, row_sum):
    """The LSE, natural logarithm, evaluated in float64 and rounded to float32; -inf for a row without keys."""
    lse = row_max.to(tl.float64) * _LN2 + log_of_normal_f64(row_sum.to(tl.float64))
    return tl.where(row_sum == 0.0, -_INF, lse.to(tl.float32))


@triton.jit
def probabilities(s, scale, shift):
    """What backward passes recompute: exp2 of a score lowered by its row's shift, the difference rounded once."""
    return tl.math.exp2(tl.fma(s, scale, -shift))


@triton.jit
def load_rows(base, offsets, row_ok, d_ok, PADDED: tl.constexpr, TAIL: tl.constexpr = True):
    """A tile [rows, d], zeros in place of absent rows (TAIL: there may be some) and, if PADDED, of columns that pad."""
    if TAIL:
        if PADDED:
            return tl.load(base + offsets, row_ok[:, None] & d_ok[None, :], 0.0)
        else:
            return tl.load(base + offsets, row_ok[:, None], 0.0)
    else:
        if PADDED:
            return tl.load(base + offsets, d_ok[None, :], 0.0)
        else:
            return tl.load(base + offsets)


@triton.jit
def sees_present(queries, keys, present, left, right, TAIL: tl.constexpr):
    """`sees`, and the key is one of the sequence."""
    visible = sees(queries, keys, left, right)
    if TAIL:
        visible = visible & present
    return visible


@triton.jit
def sees(queries, keys, left, right):
    """Whether a query position sees a key position, broadcast: keys from query - left to query + right."""
    return (keys >= queries - left) & (keys <= queries + right)


@triton.jit
def key_range(first, last, length, left, right, BN: tl.constexpr):
    """Tiles of keys for queries at positions first … last (or, left and right exchanged, of queries for keys).

    Returns four multiples of BN: tiles from `low` to `full_low` need the mask, those to `full_high` are seen whole by
    every row, those to `end` need the mask again.
    """
    high = tl.maximum(tl.minimum(length, last + right + 1), 0)
    end = tl.cdiv(high, BN) * BN
    low = tl.minimum(tl.maximum(first - left, 0) // BN * BN, end)
    full_low = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last - left, 0), BN) * BN, low), end)
    full_high = tl.maximum(tl.minimum(length, first + right + 1), 0) // BN * BN
    return low, full_low, tl.maximum(full_high, full_low), end
