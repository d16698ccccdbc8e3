"""Attention forward with LSE in portable Triton (AMD and NVIDIA).

One program computes a tile of query rows of one head over the keys of their sequence, tile after tile of BN keys from
key 0 upward. Nothing that a program reads tells it how many other rows, heads, sequences or ranks there are: which rows
it has, their positions and where their keys lie come from a table (`work.py`), a line a program.

Free: BM, PACK, warps (as long as they lie along the rows), stages, order of programs. Part of the numerics class: BN,
the matrix instruction, the layout of the row sums.
"""

import triton
import triton.language as tl

from te_overrides.kernels.attention.device import (
    inverse_of,
    key_range,
    load_rows,
    lse_of,
    positive_zero,
    sees_present,
    softmax_step,
)

_INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["s_q", "heads", "pages_s", "page_size", "left", "right"])
def forward_kernel(
    q,  # [s_q, b, h, D]
    k,  # [s_k, b, h_kv, D]; PAGED: [pages * page_size, h_kv, D]
    v,  # [s_k, b, h_kv, DV]
    out,  # [s_q, b, h, DV]
    lse,  # [b, h, s_q]
    work,  # int32 [programs, 5]: first row, rows, position of the first row, row of key 0, keys
    pages,  # PAGED: int32 [sequences, pages of a sequence], else anything
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, o_s, o_b, o_h,
    s_q, heads, pages_s, page_size, left, right,
    scale,
    GROUP: tl.constexpr,  # query heads of a key head
    PACK: tl.constexpr,  # heads whose rows share a tile: 1, or GROUP
    PAGED: tl.constexpr,
    BRANCH: tl.constexpr,  # whether tiles that every row sees whole skip the mask
    TAIL: tl.constexpr,  # whether a sequence may end inside a tile
    BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    line = work + tl.program_id(0) * 5
    first_row, rows, position = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    key_row, length = tl.load(line + 3), tl.load(line + 4)
    batch = tl.program_id(2).to(tl.int64)
    key_head = tl.program_id(1) * PACK // GROUP

    r = tl.arange(0, BM)
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    head = tl.program_id(1) * PACK + r % PACK  # [BM]
    row = r // PACK
    row_ok = row < rows
    positions = position + row
    at_row = (first_row + row).to(tl.int64)
    query_at = at_row * q_s + batch * q_b + head.to(tl.int64) * q_h
    query = load_rows(q, query_at[:, None] + d[None, :], row_ok, d < D, D != D_PAD)
    k += batch * k_b + key_head.to(tl.int64) * k_h
    v += batch * v_b + key_head.to(tl.int64) * v_h
    if PAGED:
        pages += key_row.to(tl.int64) * pages_s
    else:
        k += key_row.to(tl.int64) * k_s
        v += key_row.to(tl.int64) * v_s

    row_max = tl.full([BM], -_INF, tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV_PAD], tl.float32)
    n = tl.arange(0, BN)
    low, full_low, full_high, end = key_range(position, position + rows - 1, length, left, right, BN)
    for start in range(low, end, BN):
        keys = start + n
        present = keys < length
        if PAGED:
            # Rows of the cache: page of the key, then its place in the page.
            page = tl.load(pages + keys // page_size, present, 0).to(tl.int64)
            at_key = page * page_size + keys % page_size  # [BN]
            key = load_rows(k, at_key[:, None] * k_s + d[None, :], present, d < D, D != D_PAD)
            value = load_rows(v, at_key[:, None] * v_s + dv[None, :], present, dv < DV, DV != DV_PAD)
        else:
            at = tl.cast(start, tl.int64)
            key = load_rows(
                k + at * k_s, n[:, None] * k_s + d[None, :], present, d < D, D != D_PAD, TAIL
            )  # [BN, D]
            value = load_rows(
                v + at * v_s, n[:, None] * v_s + dv[None, :], present, dv < DV, DV != DV_PAD, TAIL
            )  # [BN, DV]
        s = tl.dot(query, key.T)  # [BM, BN]
        if BRANCH:
            if (start < full_low) | (start >= full_high):
                visible = sees_present(positions[:, None], keys[None, :], present[None, :], left, right, TAIL)
                s = tl.where(visible, s, -_INF)
        else:
            visible = sees_present(positions[:, None], keys[None, :], present[None, :], left, right, TAIL)
            s = tl.where(visible, s, -_INF)
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None])

    inverse = inverse_of(row_sum)
    # A row without keys is 0 whatever its hidden values hold.
    result = tl.where(inverse[:, None] == 0.0, 0.0, acc * inverse[:, None])
    out_at = at_row * o_s + batch * o_b + head.to(tl.int64) * o_h
    tl.store(
        out + out_at[:, None] + dv[None, :],
        positive_zero(result.to(out.dtype.element_ty)),
        row_ok[:, None] & (dv < DV)[None, :],
    )
    tl.store(lse + (batch * heads + head) * s_q + at_row, lse_of(row_max, row_sum), row_ok)
