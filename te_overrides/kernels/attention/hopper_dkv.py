"""dK and dV on Hopper: the portable kernel's arithmetic, warp-specialized as the forward pass is.

A program owns 64 keys a warpgroup, one or two of them (COUNT): two share what is loaded of the queries, one makes more
programs where there is little work. Queries come in tiles of BQ through a ring, with their shift and delta beside them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from te_overrides.kernels.attention.device import key_range, positive_zero, probabilities, sees
from te_overrides.kernels.attention.hopper_common import item, work_line, zero_tail
from te_overrides.kernels.hopper_names import async_load, async_store


@gluon.jit
def _load(
    q_d, g_d, k_d, v_d, shift_d, delta_d, k_0, k_1, v_0, v_1, q_ring, g_ring, shift_ring, delta_ring,
    k_full, k_empty, full, empty, work, total, heads, groups, lanes, s_q, spread, left, right,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h,
    GROUP: gl.constexpr, COUNT: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    step = 0
    for i in range(gl.cdiv(total, gl.num_programs(0))):
        index = item(i, total)
        if index < total:
            first_row, rows, position, query_row, length = work_line(work, index, total, lanes)
            batch = index % lanes // groups
            group = index % lanes % groups
            k_column = batch * k_b + group * k_h
            v_column = batch * v_b + group * v_h
            mbarrier.wait(k_empty, (i & 1) ^ 1)
            mbarrier.expect(k_full, 2 * 64 * COUNT * D * 2)
            async_load(k_d, [first_row, k_column], k_full, k_0)
            async_load(v_d, [first_row, v_column], k_full, v_0)
            if COUNT == 2:
                async_load(k_d, [first_row + 64, k_column], k_full, k_1)
                async_load(v_d, [first_row + 64, v_column], k_full, v_1)
            low, _full_low, _full_high, end = key_range(
                position, position + rows - 1, length, right, left, BQ
            )
            for member in range(GROUP):
                head = group * GROUP + member
                q_column = batch * q_b + head * q_h
                g_column = batch * g_b + head * g_h
                # TMA reads numbers from multiples of 16 bytes alone: copy j of the statistics lies j numbers later.
                at_stat = (batch * heads + head) * s_q + query_row
                late = (4 - at_stat % 4) % 4
                at_stat += late * (spread + 1)
                for start in range(low, end, BQ):
                    slot = step % ST
                    ready = full.index(slot)
                    mbarrier.wait(empty.index(slot), ((step // ST) & 1) ^ 1)
                    mbarrier.expect(ready, 2 * BQ * D * 2 + 2 * BQ * 4)
                    async_load(q_d, [query_row + start, q_column], ready, q_ring.index(slot))
                    async_load(shift_d, [at_stat + start], ready, shift_ring.index(slot))
                    async_load(g_d, [query_row + start, g_column], ready, g_ring.index(slot))
                    async_load(delta_d, [at_stat + start], ready, delta_ring.index(slot))
                    step += 1


@gluon.jit
def _span(
    acc_k, acc_v, step, begin, end, positions, length, left, right, scale,
    k_tile, v_tile, q_ring, g_ring, shift_ring, delta_ring, full, empty, MASK: gl.constexpr, TAIL: gl.constexpr,
    BQ: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Queries begin … end - 1 of one head."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zero = gl.zeros([64, BQ], gl.float32, SCORES)
    for start in range(begin, end, BQ):
        slot = step % ST
        mbarrier.wait(full.index(slot), (step // ST) & 1)
        query = q_ring.index(slot)
        grad = g_ring.index(slot)
        if TAIL:
            if length - start < BQ:
                zero_tail(query, length - start, BQ, D)
                zero_tail(grad, length - start, BQ, D)
        s = warpgroup_mma(k_tile, query.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
        shift = shift_ring.index(slot).load(COLUMNS)
        s = warpgroup_mma_wait(1, deps=[s])
        p = probabilities(s, scale, shift[None, :])
        if MASK:
            queries = start + gl.arange(0, BQ, layout=COLUMNS)
            visible = sees(queries[None, :], positions[:, None], left, right) & (queries < length)[None, :]
            p = gl.where(visible, p, 0.0)
        p_left = gl.convert_layout(p.to(k_tile.dtype), LEFT)
        delta = delta_ring.index(slot).load(COLUMNS)
        acc_v = warpgroup_mma(p_left, grad, acc_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = p * (dp - delta[None, :])
        if MASK:
            # What stands behind the last query may be anything: 0 times it must not become NaN.
            ds = gl.where(p == 0.0, 0.0, ds)
        ds_left = gl.convert_layout(ds.to(k_tile.dtype), LEFT)
        acc_k = warpgroup_mma(ds_left, query, acc_k, is_async=True)
        acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
        mbarrier.arrive(empty.index(slot))
        step += 1
    return acc_k, acc_v, step


@gluon.jit
def _compute(
    dk, dv, dk_d, dv_d, k_tile, v_tile, q_ring, g_ring, shift_ring, delta_ring, k_full, k_empty, full, empty,
    work, total, lanes, left, right, scale, softmax_scale,
    OFFSET: gl.constexpr, GROUP: gl.constexpr, END: gl.constexpr, TAIL: gl.constexpr,
    BQ: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    DTYPE: gl.constexpr = k_tile.dtype
    step = 0
    tile_row = OFFSET * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    for i in range(gl.cdiv(total, gl.num_programs(0))):
        index = item(i, total)
        if index < total:
            first_row, rows, position, _query_row, length = work_line(work, index, total, lanes)
            positions = position + tile_row
            low, full_low, full_high, end = key_range(position, position + rows - 1, length, right, left, BQ)
            acc_k = gl.zeros([64, D], gl.float32, OUTPUT)
            acc_v = gl.zeros([64, D], gl.float32, OUTPUT)
            mbarrier.wait(k_full, i & 1)
            for _member in range(GROUP):
                acc_k, acc_v, step = _span(
                    acc_k, acc_v, step, low, full_low, positions, length, left, right, scale,
                    k_tile, v_tile, q_ring, g_ring, shift_ring, delta_ring, full, empty, True, TAIL,
                    BQ, D, ST, SCORES, LEFT,
                )  # fmt: skip
                acc_k, acc_v, step = _span(
                    acc_k, acc_v, step, full_low, full_high, positions, length, left, right, scale,
                    k_tile, v_tile, q_ring, g_ring, shift_ring, delta_ring, full, empty, False, False,
                    BQ, D, ST, SCORES, LEFT,
                )  # fmt: skip
                if END:
                    acc_k, acc_v, step = _span(
                        acc_k, acc_v, step, full_high, end, positions, length, left, right, scale,
                        k_tile, v_tile, q_ring, g_ring, shift_ring, delta_ring, full, empty, True, TAIL,
                        BQ, D, ST, SCORES, LEFT,
                    )  # fmt: skip
            result_k = positive_zero((acc_k * softmax_scale).to(DTYPE))
            result_v = positive_zero(acc_v.to(DTYPE))
            if rows >= OFFSET * 64 + 64:
                k_tile.store(result_k)
                v_tile.store(result_v)
                fence_async_shared()
                row = first_row + OFFSET * 64
                async_store(dk_d, [row, index % lanes * D], k_tile)
                async_store(dv_d, [row, index % lanes * D], v_tile)
                tma.store_wait(0)
            else:
                r = OFFSET * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
                d = gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT))
                at = (first_row + r).to(gl.int64)[:, None] * (lanes * D) + (index % lanes * D + d)[None, :]
                gl.store(dk + at, result_k, (r < rows)[:, None])
                gl.store(dv + at, result_v, (r < rows)[:, None])
            mbarrier.arrive(k_empty)


@gluon.jit(
    do_not_specialize=[
        "total",
        "heads",
        "lanes",
        "s_q",
        "spread",
        "left",
        "right",
        "groups",
        "q_b",
        "q_h",
        "k_b",
        "k_h",
        "v_b",
        "v_h",
        "g_b",
        "g_h",
    ]
)
def hopper_dkv_kernel(
    q_d, g_d, k_d, v_d, shift_d, delta_d, dk_d, dv_d,  # BQ, BQ, 64, 64 rows of D columns, BQ, BQ numbers, 64, 64 rows
    dk, dv,  # [s_k, b, h_kv, D], contiguous
    work,  # int32 [tiles, 5]: first key row, rows, position of the first, row of query 0, queries; 64 * COUNT rows
    total,  # tiles * b * h_kv
    heads, groups, lanes, s_q,
    spread,  # from one copy of the statistics to the next; copies 1 to 3 are read where s_q or an origin is odd to 4
    left, right,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h,
    scale, softmax_scale,
    GROUP: gl.constexpr, END: gl.constexpr, TAIL: gl.constexpr, COUNT: gl.constexpr, BQ: gl.constexpr,
    D: gl.constexpr, ST: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`lanes` is b * h_kv, the items of one line; END that the last queries need a
    mask (a window, or a short last tile), TAIL that rows may lie behind a sequence's last query."""
    k_0 = gl.allocate_shared_memory(k_d.dtype, [64, D], k_d.layout)
    v_0 = gl.allocate_shared_memory(v_d.dtype, [64, D], v_d.layout)
    if COUNT == 2:
        k_1 = gl.allocate_shared_memory(k_d.dtype, [64, D], k_d.layout)
        v_1 = gl.allocate_shared_memory(v_d.dtype, [64, D], v_d.layout)
    else:
        k_1 = k_0
        v_1 = v_0
    q_ring = gl.allocate_shared_memory(q_d.dtype, [ST, BQ, D], q_d.layout)
    g_ring = gl.allocate_shared_memory(g_d.dtype, [ST, BQ, D], g_d.layout)
    shift_ring = gl.allocate_shared_memory(gl.float32, [ST, BQ], shift_d.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [ST, BQ], delta_d.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_empty, count=COUNT)
    for slot in gl.static_range(ST):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=COUNT)
    fence_async_shared()
    if COUNT == 2:
        gl.warp_specialize(
            [
                (_compute, (
                    dk, dv, dk_d, dv_d, k_0, v_0, q_ring, g_ring, shift_ring, delta_ring, k_full, k_empty, full, empty,
                    work, total, lanes, left, right, scale, softmax_scale,
                    0, GROUP, END, TAIL, BQ, D, ST,
                )),
                (_compute, (
                    dk, dv, dk_d, dv_d, k_1, v_1, q_ring, g_ring, shift_ring, delta_ring, k_full, k_empty, full, empty,
                    work, total, lanes, left, right, scale, softmax_scale,
                    1, GROUP, END, TAIL, BQ, D, ST,
                )),
                (_load, (
                    q_d, g_d, k_d, v_d, shift_d, delta_d, k_0, k_1, v_0, v_1, q_ring, g_ring, shift_ring, delta_ring,
                    k_full, k_empty, full, empty, work, total, heads, groups, lanes, s_q, spread, left, right,
                    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, GROUP, COUNT, BQ, D, ST,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    dk, dv, dk_d, dv_d, k_0, v_0, q_ring, g_ring, shift_ring, delta_ring, k_full, k_empty, full, empty,
                    work, total, lanes, left, right, scale, softmax_scale,
                    0, GROUP, END, TAIL, BQ, D, ST,
                )),
                (_load, (
                    q_d, g_d, k_d, v_d, shift_d, delta_d, k_0, k_1, v_0, v_1, q_ring, g_ring, shift_ring, delta_ring,
                    k_full, k_empty, full, empty, work, total, heads, groups, lanes, s_q, spread, left, right,
                    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, GROUP, COUNT, BQ, D, ST,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
