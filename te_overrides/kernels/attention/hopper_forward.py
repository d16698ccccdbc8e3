"""Attention forward on Hopper: the portable kernel's arithmetic, warp-specialized.

    producer warp       Q of a tile, then K and V tiles through rings of ST buffers, all by TMA
    two warpgroups      64 query rows each; the scores of the next tile are issued before P V of the last one

A branch around the mask is the fastest here (docs/evidence/attention.md). Where other rows lie behind a sequence's last
tile (TAIL), spans of tiles with and without the mask take its place.

Positions, rows and keys come from the same table as in the portable kernel; heads and sequences of a batch are columns
of a two-dimensional view of each operand, so any strides that TMA takes are read in place.
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

from te_overrides.kernels.attention.device import (
    inverse_of,
    key_range,
    lse_of,
    positive_zero,
    sees,
    softmax_step,
)
from te_overrides.kernels.attention.hopper_common import item, work_line, zero_tail
from te_overrides.kernels.hopper_names import async_load, async_store


@gluon.jit
def _load(
    q_d, k_d, v_d, q_0, q_1, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    work, total, heads, lanes, GROUP: gl.constexpr, left, right,
    q_b, q_h, k_b, k_h, v_b, v_h, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    step = 0
    for i in range(gl.cdiv(total, gl.num_programs(0))):
        index = item(i, total)
        if index < total:
            first_row, rows, position, key_row, length = work_line(work, index, total, lanes)
            batch = index % lanes // heads
            head = index % lanes % heads
            column = batch * q_b + head * q_h
            mbarrier.wait(q_empty, (i & 1) ^ 1)
            mbarrier.expect(q_full, 2 * 64 * D * 2)
            async_load(q_d, [first_row, column], q_full, q_0)
            async_load(q_d, [first_row + 64, column], q_full, q_1)
            low, _full_low, _full_high, end = key_range(
                position, position + rows - 1, length, left, right, BN
            )
            k_column = batch * k_b + head // GROUP * k_h
            v_column = batch * v_b + head // GROUP * v_h
            for start in range(low, end, BN):
                slot = step % ST
                phase = ((step // ST) & 1) ^ 1
                mbarrier.wait(k_empty.index(slot), phase)
                mbarrier.expect(k_full.index(slot), BN * D * 2)
                async_load(k_d, [key_row + start, k_column], k_full.index(slot), k_ring.index(slot))
                mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(v_full.index(slot), BN * D * 2)
                async_load(v_d, [key_row + start, v_column], v_full.index(slot), v_ring.index(slot))
                step += 1


@gluon.jit
def _scores(q_tile, k_ring, k_full, step, BN: gl.constexpr, ST: gl.constexpr, SCORES: gl.constexpr):
    slot = step % ST
    mbarrier.wait(k_full.index(slot), (step // ST) & 1)
    zero = gl.zeros([64, BN], gl.float32, SCORES)
    return warpgroup_mma(q_tile, k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)


PLAIN, MASKED, WHERE_NEEDED = (gl.constexpr(kind) for kind in range(3))
"""What `_span` does about the mask: nothing, always, or by a branch in tiles that some row does not see whole."""


@gluon.jit
def _masked(s, positions, start, length, left, right, BN: gl.constexpr, SCORES: gl.constexpr):
    keys = start + gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
    visible = sees(positions[:, None], keys[None, :], left, right) & (keys < length)[None, :]
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _add_values(p, v_ring, v_full, acc, step, ST: gl.constexpr):
    slot = step % ST
    mbarrier.wait(v_full.index(slot), (step // ST) & 1)
    return warpgroup_mma(p, v_ring.index(slot), acc, is_async=True)


@gluon.jit
def _span(
    acc, p_left, row_max, row_sum, step, begin, end, full_low, full_high, positions, length, left, right, scale,
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, MASK: gl.constexpr,
    BN: gl.constexpr, ST: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Tiles begin … end - 1: the scores of each, while the values of the one before (`step`) are added."""
    for start in range(begin, end, BN):
        s = _scores(q_tile, k_ring, k_full, step + 1, BN, ST, SCORES)
        acc = _add_values(p_left, v_ring, v_full, acc, step, ST)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index((step + 1) % ST))
        if MASK == MASKED:
            s = _masked(s, positions, start, length, left, right, BN, SCORES)
        elif MASK == WHERE_NEEDED:
            if (start < full_low) | (start >= full_high):
                s = _masked(s, positions, start, length, left, right, BN, SCORES)
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(step % ST))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
        p_left = gl.convert_layout(p.to(q_tile.dtype), LEFT)
        step += 1
    return acc, p_left, row_max, row_sum, step


@gluon.jit
def _compute(
    out, o_d, lse, q_tile, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    work, total, lanes, s_q, left, right, scale,
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
        # The next item's line is on its way while this one is computed.
        following = work_line(work, item(i + 1, total), total, lanes)
        if index < total:
            positions = position + tile_row
            low, full_low, full_high, end = key_range(position, position + rows - 1, length, left, right, BN)
            row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
            row_sum = gl.zeros([64], gl.float32, ROWS)
            acc = gl.zeros([64, D], gl.float32, OUTPUT)
            mbarrier.wait(q_full, i & 1)
            if low < end:
                s = _scores(q_tile, k_ring, k_full, step, BN, ST, SCORES)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_empty.index(step % ST))
                if TAIL:
                    s = _masked(s, positions, low, length, left, right, BN, SCORES)
                else:
                    if (low < full_low) | (low >= full_high):
                        s = _masked(s, positions, low, length, left, right, BN, SCORES)
                p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale)
                p_left = gl.convert_layout(p.to(DTYPE), LEFT)
                begin = low + BN
                if TAIL:
                    if WINDOW:
                        acc, p_left, row_max, row_sum, step = _span(
                            acc, p_left, row_max, row_sum, step, begin, full_low, full_low, full_high, positions,
                            length, left, right, scale, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
                            MASKED, BN, ST, SCORES, OUTPUT, LEFT,
                        )  # fmt: skip
                        begin = gl.maximum(begin, full_low)
                    acc, p_left, row_max, row_sum, step = _span(
                        acc, p_left, row_max, row_sum, step, begin, full_high, full_low, full_high, positions, length,
                        left, right, scale, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, PLAIN,
                        BN, ST, SCORES, OUTPUT, LEFT,
                    )  # fmt: skip
                    begin = gl.maximum(begin, full_high)
                    acc, p_left, row_max, row_sum, step = _span(
                        acc, p_left, row_max, row_sum, step, begin, end, full_low, full_high, positions, length,
                        left, right, scale, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, MASKED,
                        BN, ST, SCORES, OUTPUT, LEFT,
                    )  # fmt: skip
                    present = length - (end - BN)
                    if present < BN:
                        mbarrier.wait(v_full.index(step % ST), (step // ST) & 1)
                        zero_tail(v_ring.index(step % ST), present, BN, D)
                else:
                    acc, p_left, row_max, row_sum, step = _span(
                        acc, p_left, row_max, row_sum, step, begin, end, full_low, full_high, positions, length,
                        left, right, scale, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, WHERE_NEEDED,
                        BN, ST, SCORES, OUTPUT, LEFT,
                    )  # fmt: skip
                acc = _add_values(p_left, v_ring, v_full, acc, step, ST)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(step % ST))
                step += 1
            row_inverse = inverse_of(row_sum)
            at_stat = (index % lanes).to(gl.int64) * s_q + first_row + tile_row
            gl.store(lse + at_stat, lse_of(row_max, row_sum), tile_row < rows)
            scaled = gl.convert_layout(row_inverse, gl.SliceLayout(1, OUTPUT))[:, None]
            result = positive_zero(gl.where(scaled == 0.0, 0.0, acc * scaled).to(DTYPE))
            if rows >= OFFSET * 64 + 64:
                # The query buffer is free now: it stages the output.
                q_tile.store(result)
                fence_async_shared()
                async_store(o_d, [first_row + OFFSET * 64, index % lanes * D], q_tile)
                tma.store_wait(0)
            else:
                r = OFFSET * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
                d = gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT))
                at = (first_row + r).to(gl.int64)[:, None] * (lanes * D) + (index % lanes * D + d)[None, :]
                gl.store(out + at, result, (r < rows)[:, None])
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
    ]
)
def hopper_forward_kernel(
    q_d, k_d, v_d, o_d,  # descriptors of [s, columns] views: 64, BN, BN and 64 rows of D columns
    out,  # [s_q, b, h, D], contiguous
    lse,  # [b, h, s_q]
    work,  # int32 [tiles, 5]: first row, rows, position of the first row, row of key 0, keys; tiles of 128 rows
    total,  # tiles * b * h
    heads, lanes, s_q, left, right,
    q_b, q_h, k_b, k_h, v_b, v_h,
    scale,
    GROUP: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    ST: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`lanes` is b * h, the items of one line; TAIL says that rows may lie behind a sequence's last, short tile."""
    q_0 = gl.allocate_shared_memory(q_d.dtype, [64, D], q_d.layout)
    q_1 = gl.allocate_shared_memory(q_d.dtype, [64, D], q_d.layout)
    k_ring = gl.allocate_shared_memory(k_d.dtype, [ST, BN, D], k_d.layout)
    v_ring = gl.allocate_shared_memory(v_d.dtype, [ST, BN, D], v_d.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for slot in gl.static_range(ST):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                out, o_d, lse, q_0, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                work, total, lanes, s_q, left, right, scale, 0, WINDOW, TAIL, BN, D, ST,
            )),
            (_compute, (
                out, o_d, lse, q_1, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                work, total, lanes, s_q, left, right, scale, 1, WINDOW, TAIL, BN, D, ST,
            )),
            (_load, (
                q_d, k_d, v_d, q_0, q_1, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                work, total, heads, lanes, GROUP, left, right, q_b, q_h, k_b, k_h, v_b, v_h, BN, D, ST,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
