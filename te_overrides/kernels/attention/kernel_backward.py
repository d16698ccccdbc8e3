"""Attention backward by ownership in portable Triton (AMD and NVIDIA): statistics of rows, dQ, and dK with dV.

`dq_kernel` computes a tile of query rows over keys ascending; `dkv_kernel` a tile of key rows over the heads of their
group ascending and, inside a head, over queries ascending in tiles of BQ from position 0. Each recomputes the scores it
needs: seven products where a backward that scatters partial sums does five, and no atomics, no partial sum in memory.

Free: BM, BN of `dq_kernel`, the key tile BK and the query tile BQ of `dkv_kernel` (multiples of what one matrix
instruction takes), warps, stages. Nothing is reduced over a row here, so warps may lie anywhere.
"""

import triton
import triton.language as tl

from te_overrides.kernels.attention.device import (
    key_range,
    load_rows,
    positive_zero,
    probabilities,
    sees,
    sees_present,
)
from te_overrides.kernels.rounding.kernel import converted

_INF = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows", "heads"])
def statistics_kernel(
    grad_out,  # [s, b, h, DV]
    out,  # [s, b, h, DV]
    lse,  # [b, h, s]
    shift,  # [b, h, s]
    delta,  # [b, h, s]
    g_s, g_b, g_h, o_s, o_b, o_h, rows, heads,
    ROWS: tl.constexpr, LEVELS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """delta = balanced tree over d of round32(dO * out), the reference's bits; shift = what scores are lowered by.

    The shift is the LSE in units of log 2, +inf for a row without keys, so that its p is 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, DV_PAD)
    at_row = row.to(tl.int64)
    inside = (row < rows)[:, None] & (d < DV)[None, :]
    x = tl.load(
        grad_out + batch * g_b + head.to(tl.int64) * g_h + (at_row * g_s)[:, None] + d[None, :], inside, 0.0
    )
    y = tl.load(
        out + batch * o_b + head.to(tl.int64) * o_h + (at_row * o_s)[:, None] + d[None, :], inside, 0.0
    )
    # -0.0 is what addition leaves every value as it is with: columns that only pad do not change the tree.
    terms = tl.where(inside, x.to(tl.float32) * y.to(tl.float32), -0.0)
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(terms, [ROWS, DV_PAD >> (level + 1), 2]))
        terms = left + right
    at = (batch * heads + head) * rows + row
    tl.store(delta + at, tl.reshape(terms, [ROWS]), row < rows)
    row_lse = tl.load(lse + at, row < rows, 0.0)
    tl.store(shift + at, tl.where(row_lse == -_INF, _INF, row_lse * LOG2_E), row < rows)


@triton.jit(do_not_specialize=["s_q", "heads", "left", "right"])
def dq_kernel(
    q,  # [s_q, b, h, D]
    k,  # [s_k, b, h_kv, D]
    v,  # [s_k, b, h_kv, DV]
    grad_out,  # [s_q, b, h, DV]
    shift,  # [b, h, s_q]
    delta,  # [b, h, s_q]
    dq,  # [s_q, b, h, D]
    work,  # int32 [programs, 5], as in the forward pass
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, g_s, g_b, g_h, dq_s, dq_b, dq_h,
    s_q, heads, left, right,
    scale, softmax_scale,
    GROUP: tl.constexpr, BRANCH: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    line = work + tl.program_id(0) * 5
    first_row, rows, position = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    key_row, length = tl.load(line + 3), tl.load(line + 4)
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)

    r = tl.arange(0, BM)
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    row_ok = r < rows
    positions = position + r
    at_row = (first_row + r).to(tl.int64)
    query = load_rows(
        q + batch * q_b + head * q_h, (at_row * q_s)[:, None] + d[None, :], row_ok, d < D, D != D_PAD
    )
    grad = load_rows(
        grad_out + batch * g_b + head * g_h,
        (at_row * g_s)[:, None] + dv[None, :], row_ok, dv < DV, DV != DV_PAD,
    )  # fmt: skip
    at_stat = (batch * heads + head) * s_q + at_row
    row_shift = tl.load(shift + at_stat, row_ok, _INF)
    row_delta = tl.load(delta + at_stat, row_ok, 0.0)
    key_head = head // GROUP
    k += batch * k_b + key_head * k_h + key_row.to(tl.int64) * k_s
    v += batch * v_b + key_head * v_h + key_row.to(tl.int64) * v_s

    acc = tl.zeros([BM, D_PAD], tl.float32)
    n = tl.arange(0, BN)
    low, full_low, full_high, end = key_range(position, position + rows - 1, length, left, right, BN)
    for start in range(low, end, BN):
        keys = start + n
        present = keys < length
        at = tl.cast(start, tl.int64)
        key = load_rows(k + at * k_s, n[:, None] * k_s + d[None, :], present, d < D, D != D_PAD, TAIL)
        value = load_rows(v + at * v_s, n[:, None] * v_s + dv[None, :], present, dv < DV, DV != DV_PAD, TAIL)
        p = probabilities(tl.dot(query, key.T), scale, row_shift[:, None])  # [BM, BN]
        if BRANCH:
            if (start < full_low) | (start >= full_high):
                visible = sees_present(positions[:, None], keys[None, :], present[None, :], left, right, TAIL)
                p = tl.where(visible, p, 0.0)
        else:
            visible = sees_present(positions[:, None], keys[None, :], present[None, :], left, right, TAIL)
            p = tl.where(visible, p, 0.0)
        ds = p * (tl.dot(grad, value.T) - row_delta[:, None])
        acc = tl.dot(converted(ds, key.dtype, HIP), key, acc)
    tl.store(
        dq + batch * dq_b + head * dq_h + (at_row * dq_s)[:, None] + d[None, :],
        positive_zero(converted(acc * softmax_scale, dq.dtype.element_ty, HIP)),
        row_ok[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=["s_q", "heads", "left", "right"])
def dkv_kernel(
    q,  # [s_q, b, h, D]: all queries, those of a sequence in the order of positions
    k,  # [s_k, b, h_kv, D]
    v,  # [s_k, b, h_kv, DV]
    grad_out,  # [s_q, b, h, DV]
    shift,  # [b, h, s_q]
    delta,  # [b, h, s_q]
    dk,  # [s_k, b, h_kv, D]
    dv,  # [s_k, b, h_kv, DV]
    work,  # int32 [programs, 5]: first key row, rows, position of the first, row of query 0, queries
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, g_s, g_b, g_h, dk_s, dk_b, dk_h, dv_s, dv_b, dv_h,
    s_q, heads, left, right,
    scale, softmax_scale,
    GROUP: tl.constexpr, BRANCH: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    line = work + tl.program_id(0) * 5
    first_row, rows, position = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    query_row, length = tl.load(line + 3), tl.load(line + 4)
    batch, key_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)

    r = tl.arange(0, BK)
    d = tl.arange(0, D_PAD)
    e = tl.arange(0, DV_PAD)
    row_ok = r < rows
    positions = position + r
    at_row = (first_row + r).to(tl.int64)
    key = load_rows(
        k + batch * k_b + key_head * k_h,
        (at_row * k_s)[:, None] + d[None, :],
        row_ok,
        d < D,
        D != D_PAD,
    )
    value = load_rows(
        v + batch * v_b + key_head * v_h,
        (at_row * v_s)[:, None] + e[None, :],
        row_ok,
        e < DV,
        DV != DV_PAD,
    )
    acc_k = tl.zeros([BK, D_PAD], tl.float32)
    acc_v = tl.zeros([BK, DV_PAD], tl.float32)
    # A key is seen from position - right to position + left.
    low, full_low, full_high, end = key_range(position, position + rows - 1, length, right, left, BQ)
    # One loop over heads and tiles keeps the pipeline full from head to head, and addresses out of the registers.
    tiles = (end - low) // BQ
    m = tl.arange(0, BQ)
    for step in range(GROUP * tiles):
        head = key_head * GROUP + step // tiles
        start = low + step % tiles * BQ
        queries = start + m
        present = queries < length
        at = tl.cast(query_row + start, tl.int64)
        # Absent queries load as zeros with a shift of +inf: their p and ds are 0 without a mask.
        query = load_rows(
            q + batch * q_b + head * q_h + at * q_s,
            m[:, None] * q_s + d[None, :], present, d < D, D != D_PAD, TAIL,
        )  # fmt: skip
        grad = load_rows(
            grad_out + batch * g_b + head * g_h + at * g_s,
            m[:, None] * g_s + e[None, :], present, e < DV, DV != DV_PAD, TAIL,
        )  # fmt: skip
        stat = (batch * heads + head) * s_q + at
        if TAIL:
            column_shift = tl.load(shift + stat + m, present, _INF)
            column_delta = tl.load(delta + stat + m, present, 0.0)
        else:
            column_shift = tl.load(shift + stat + m)
            column_delta = tl.load(delta + stat + m)
        # Keys are the rows here: what both products contract over, queries, then lies in registers as their left side.
        p = probabilities(tl.dot(key, query.T), scale, column_shift[None, :])  # [BK, BQ]
        if BRANCH:
            if (start < full_low) | (start >= full_high):
                p = tl.where(sees(queries[None, :], positions[:, None], left, right), p, 0.0)
        else:
            p = tl.where(sees(queries[None, :], positions[:, None], left, right), p, 0.0)
        acc_v = tl.dot(p.to(grad.dtype), grad, acc_v)
        ds = p * (tl.dot(value, grad.T) - column_delta[None, :])
        acc_k = tl.dot(converted(ds, query.dtype, HIP), query, acc_k)
    tl.store(
        dk + batch * dk_b + key_head * dk_h + (at_row * dk_s)[:, None] + d[None, :],
        positive_zero(converted(acc_k * softmax_scale, dk.dtype.element_ty, HIP)),
        row_ok[:, None] & (d < D)[None, :],
    )
    tl.store(
        dv + batch * dv_b + key_head * dv_h + (at_row * dv_s)[:, None] + e[None, :],
        positive_zero(acc_v.to(dv.dtype.element_ty)),
        row_ok[:, None] & (e < DV)[None, :],
    )
