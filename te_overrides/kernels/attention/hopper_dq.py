"""dQ on Hopper: the portable kernel's arithmetic, warp-specialized as the forward pass is.

Two warpgroups own 64 query rows each; K and V of a tile share a buffer of the ring.
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
    q_d, g_d, k_d, v_d, q_0, q_1, g_0, g_1, k_ring, v_ring, q_full, q_empty, full, empty,
    work, total, heads, lanes, GROUP: gl.constexpr, left, right,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    step = 0
    for i in range(gl.cdiv(total, gl.num_programs(0))):
        index = item(i, total)
        if index < total:
            first_row, rows, position, key_row, length = work_line(work, index, total, lanes)
            batch = index % lanes // heads
            head = index % lanes % heads
            q_column = batch * q_b + head * q_h
            g_column = batch * g_b + head * g_h
            mbarrier.wait(q_empty, (i & 1) ^ 1)
            mbarrier.expect(q_full, 4 * 64 * D * 2)
            async_load(q_d, [first_row, q_column], q_full, q_0)
            async_load(q_d, [first_row + 64, q_column], q_full, q_1)
            async_load(g_d, [first_row, g_column], q_full, g_0)
            async_load(g_d, [first_row + 64, g_column], q_full, g_1)
            low, _full_low, _full_high, end = key_range(
                position, position + rows - 1, length, left, right, BN
            )
            k_column = batch * k_b + head // GROUP * k_h
            v_column = batch * v_b + head // GROUP * v_h
            for start in range(low, end, BN):
                slot = step % ST
                mbarrier.wait(empty.index(slot), ((step // ST) & 1) ^ 1)
                mbarrier.expect(full.index(slot), 2 * BN * D * 2)
                async_load(k_d, [key_row + start, k_column], full.index(slot), k_ring.index(slot))
                async_load(v_d, [key_row + start, v_column], full.index(slot), v_ring.index(slot))
                step += 1


@gluon.jit
def _span(
    acc, step, begin, end, positions, length, left, right, scale, row_shift, row_delta,
    q_tile, g_tile, k_ring, v_ring, full, empty, MASK: gl.constexpr, TAIL: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Keys begin … end - 1."""
    zero = gl.zeros([64, BN], gl.float32, SCORES)
    for start in range(begin, end, BN):
        slot = step % ST
        mbarrier.wait(full.index(slot), (step // ST) & 1)
        key = k_ring.index(slot)
        if TAIL:
            if length - start < BN:
                zero_tail(key, length - start, BN, D)
        s = warpgroup_mma(q_tile, key.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(g_tile, v_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = probabilities(s, scale, row_shift[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - row_delta[:, None])
        if MASK:
            keys = start + gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
            visible = sees(positions[:, None], keys[None, :], left, right) & (keys < length)[None, :]
            ds = gl.where(visible, ds, 0.0)
        ds_left = gl.convert_layout(ds.to(q_tile.dtype), LEFT)
        acc = warpgroup_mma(ds_left, key, acc, is_async=True)
        # The other warpgroup fills the gap.
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot))
        step += 1
    return acc, step


@gluon.jit
def _compute(
    dq, dq_d, shift, delta, q_tile, g_tile, k_ring, v_ring, q_full, q_empty, full, empty,
    work, total, lanes, s_q, left, right, scale, softmax_scale,
    OFFSET: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    DTYPE: gl.constexpr = q_tile.dtype
    step = 0
    tile_row = OFFSET * 64 + gl.arange(0, 64, layout=ROWS)
    first_row, rows, position, _key_row, length = work_line(work, item(0, total), total, lanes)
    for i in range(gl.cdiv(total, gl.num_programs(0))):
        index = item(i, total)
        following = work_line(work, item(i + 1, total), total, lanes)
        if index < total:
            positions = position + tile_row
            row_ok = tile_row < rows
            at_stat = (index % lanes).to(gl.int64) * s_q + first_row + tile_row
            row_shift = gl.load(shift + at_stat, row_ok, float("inf"))
            row_delta = gl.load(delta + at_stat, row_ok, 0.0)
            low, full_low, full_high, end = key_range(position, position + rows - 1, length, left, right, BN)
            acc = gl.zeros([64, D], gl.float32, OUTPUT)
            mbarrier.wait(q_full, i & 1)
            begin = low
            if WINDOW:
                acc, step = _span(
                    acc, step, begin, full_low, positions, length, left, right, scale, row_shift, row_delta,
                    q_tile, g_tile, k_ring, v_ring, full, empty, True, TAIL, BN, D, ST, SCORES, LEFT,
                )  # fmt: skip
                begin = full_low
            acc, step = _span(
                acc, step, begin, full_high, positions, length, left, right, scale, row_shift, row_delta,
                q_tile, g_tile, k_ring, v_ring, full, empty, False, False, BN, D, ST, SCORES, LEFT,
            )  # fmt: skip
            acc, step = _span(
                acc, step, full_high, end, positions, length, left, right, scale, row_shift, row_delta,
                q_tile, g_tile, k_ring, v_ring, full, empty, True, TAIL, BN, D, ST, SCORES, LEFT,
            )  # fmt: skip
            result = positive_zero((acc * softmax_scale).to(DTYPE))
            if rows >= OFFSET * 64 + 64:
                q_tile.store(result)
                fence_async_shared()
                async_store(dq_d, [first_row + OFFSET * 64, index % lanes * D], q_tile)
                tma.store_wait(0)
            else:
                r = OFFSET * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
                d = gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT))
                at = (first_row + r).to(gl.int64)[:, None] * (lanes * D) + (index % lanes * D + d)[None, :]
                gl.store(dq + at, result, (r < rows)[:, None])
            mbarrier.arrive(q_empty)
        first_row, rows, position, _key_row, length = following


@gluon.jit(
    do_not_specialize=[
        "total",
        "heads",
        "lanes",
        "s_q",
        "left",
        "right",
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
def hopper_dq_kernel(
    q_d, g_d, k_d, v_d, dq_d,  # descriptors of [s, columns] views: 64, 64, BN, BN and 64 rows of D columns
    shift, delta,  # [b, h, s_q]
    dq,  # [s_q, b, h, D], contiguous
    work,  # int32 [tiles, 5], as in the forward pass
    total, heads, lanes, s_q, left, right,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h,
    scale, softmax_scale,
    GROUP: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    ST: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as for `hopper_forward_kernel`."""
    q_0 = gl.allocate_shared_memory(q_d.dtype, [64, D], q_d.layout)
    q_1 = gl.allocate_shared_memory(q_d.dtype, [64, D], q_d.layout)
    g_0 = gl.allocate_shared_memory(g_d.dtype, [64, D], g_d.layout)
    g_1 = gl.allocate_shared_memory(g_d.dtype, [64, D], g_d.layout)
    k_ring = gl.allocate_shared_memory(k_d.dtype, [ST, BN, D], k_d.layout)
    v_ring = gl.allocate_shared_memory(v_d.dtype, [ST, BN, D], v_d.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for slot in gl.static_range(ST):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                dq, dq_d, shift, delta, q_0, g_0, k_ring, v_ring, q_full, q_empty, full, empty,
                work, total, lanes, s_q, left, right, scale, softmax_scale,
                0, WINDOW, TAIL, BN, D, ST,
            )),
            (_compute, (
                dq, dq_d, shift, delta, q_1, g_1, k_ring, v_ring, q_full, q_empty, full, empty,
                work, total, lanes, s_q, left, right, scale, softmax_scale,
                1, WINDOW, TAIL, BN, D, ST,
            )),
            (_load, (
                q_d, g_d, k_d, v_d, q_0, q_1, g_0, g_1, k_ring, v_ring, q_full, q_empty, full, empty,
                work, total, heads, lanes, GROUP, left, right, q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, BN, D, ST,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
