"""The contract's two matrix products for Hopper GPUs, in the bits of the portable kernel: persistent, warp specialized.

One producer warp feeds a ring of tiles through the tensor memory accelerator; two consumer warpgroups own 64 rows each
of a 128-row tile and may drift apart, so that one rounds, adds tree levels and writes while the other keeps the tensor
cores busy. A program walks output tiles until none is left.

The matrix instruction and the order of its chain are those that Triton emits for the portable kernel on this GPU, K
ascending sixteen at a time: one numerics class. Open levels of the lanes' tree wait in registers (level 0), in shared
memory (level 1) and in scratch memory private to each thread (level 2).

Operands may lie either way round in memory ([M, K] or [K, M], [N, K] or [K, N]): nothing is copied.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from te_overrides.kernels.gemm.reference import LANES
from te_overrides.kernels.hopper_names import async_load, async_store, reinterpret
from te_overrides.kernels.launching import Plans, device_of, signature
from te_overrides.kernels.tensor_maps import MappedLaunch, TensorMap

BLOCK_M, BLOCK_K = 128, 64
GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _tile(t, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Tile number -> row and column of the tile: GROUP rows of tiles at a time, so that operands stay in the cache."""
    width = GROUP * tiles_n
    first = (t // width) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + (t % width) % height, (t % width) // height


@gluon.jit
def _copy(descriptor, along_k: gl.constexpr, row, k, barrier, to):
    """One tile of an operand: rows from `row`, K from `k`; `along_k`: K is the contiguous dimension."""
    if along_k:
        async_load(descriptor, [row, k], barrier, to)
    else:
        async_load(descriptor, [k, row], barrier, to)


@gluon.jit
def _producer(
    a, b, ring_a0, ring_a1, ring_b, full, empty, tiles_m, tiles_n, steps, lane_width, segment_width, half,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LANES: gl.constexpr, SEGMENTS: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    it = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(t, tiles_m, tiles_n, GROUP)
        for lane in range(LANES):
            for segment in range(SEGMENTS):
                start = segment * segment_width + lane * lane_width
                for step in range(steps):
                    k = start + step * BK
                    slot = it % STAGES
                    ready = full.index(slot)
                    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
                    mbarrier.expect(ready, (BM + BN) * BK * 2)
                    _copy(a, A_K, tile_m * BM, k, ready, ring_a0.index(slot))
                    _copy(a, A_K, tile_m * BM + BM // 2, k, ready, ring_a1.index(slot))
                    if (
                        GATED
                    ):  # half of the tile's columns from the gate's rows, half from the up projection's
                        side: gl.constexpr = BN // 2
                        tile = ring_b.index(slot)
                        _copy(b, B_K, tile_n * side, k, ready, tile.slice(0, side))
                        _copy(b, B_K, half + tile_n * side, k, ready, tile.slice(side, side))
                    else:
                        _copy(b, B_K, tile_n * BN, k, ready, ring_b.index(slot))
                    it += 1


@gluon.jit
def _round(acc, DTYPE: gl.constexpr):
    """float32 to a 16-bit dtype, nearest even; opaque, or the compiler moves it behind the next lane's loop."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [acc], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [acc], dtype=gl.float16, is_pure=False, pack=2
        )


@gluon.jit
def _flat(x, BN: gl.constexpr):
    """Accumulator layout to one dimension in which a thread's values are 16-byte vectors; moves no data."""
    x = x.reshape([4, 2, 8, BN // 16, 2, 4, 2]).permute(0, 3, 2, 5, 4, 1, 6)
    return x.reshape([64 * BN])


@gluon.jit
def _unflat(y, like, BN: gl.constexpr):
    z = y.reshape([4, BN // 16, 8, 4, 2, 2, 2]).permute(0, 5, 2, 1, 4, 3, 6).reshape([64, BN])
    return gl.convert_layout(z, like.type.layout, assert_trivial=True)


@gluon.jit
def _store_16(c, staging, out, row, column, BN: gl.constexpr, CN: gl.constexpr):
    """A 16-bit tile through shared memory, in one piece or in two halves."""
    tma.store_wait(0)
    if CN == BN:
        staging.store(out)
        fence_async_shared()
        async_store(c, [row, column], staging)
    else:
        low, high = _halves(out)
        staging.store(low)
        fence_async_shared()
        async_store(c, [row, column], staging)
        tma.store_wait(0)
        staging.store(high)
        fence_async_shared()
        async_store(c, [row, column + CN], staging)


@gluon.jit
def _halves(x):
    """[64, W] -> its left and its right half; moves no data."""
    return x.reshape([64, 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def _store_32(c, acc, row, column, M, N, stride, ADD: gl.constexpr):
    """Float32 columns straight from the registers, written or (ADD) added to what is there: one rounding."""
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    at = (c + row.to(gl.int64) * stride + column) + (rows[:, None] * stride + columns[None, :])
    inside = (row + rows < M)[:, None] & (column + columns < N)[None, :]
    if ADD:
        acc = gl.load(at, mask=inside, other=0.0) + acc
    gl.store(at, acc, mask=inside)


@gluon.jit
def _store_32_in_quarters(c, acc, row, column, M, N, stride, ADD: gl.constexpr, BN: gl.constexpr):
    """A quarter of a tile at a time: the addresses of a whole one do not fit into the registers beside it."""
    left, right = _halves(acc)
    first, second = _halves(left)
    third, fourth = _halves(right)
    _store_32(c, first, row, column, M, N, stride, ADD)
    _store_32(c, second, row, column + BN // 4, M, N, stride, ADD)
    _store_32(c, third, row, column + BN // 2, M, N, stride, ADD)
    _store_32(c, fourth, row, column + 3 * BN // 4, M, N, stride, ADD)


@gluon.jit
def _consumer(
    c, staging, line, ring_a, ring_b, full, empty, scratch, tiles_m, tiles_n, steps, M, N, stride,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LANES: gl.constexpr, SEGMENTS: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, DTYPE: gl.constexpr,
    CN: gl.constexpr, WIDE: gl.constexpr, ADD: gl.constexpr, POSITIVE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    own = scratch + (gl.program_id(0) * 2 + HALF) * (64 * BN)
    it = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(t, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([64, BN], gl.float32, layout)
        s0 = gl.zeros([64, BN], DTYPE, layout)
        out = s0
        for lane in gl.static_range(LANES):
            for step in range(steps * SEGMENTS):
                slot = it % STAGES
                mbarrier.wait(full.index(slot), (it // STAGES) & 1)
                x = ring_a.index(slot) if A_K else ring_a.index(slot).permute((1, 0))
                y = ring_b.index(slot).permute((1, 0)) if B_K else ring_b.index(slot)
                acc = warpgroup_mma(x, y, acc, use_acc=step > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=step > 0)
                it += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
            if not WIDE:
                p = _round(acc, DTYPE)
                # A binary counter: the lane's trailing ones say how many levels of the tree close here.
                if lane % 2 == 1:
                    p = s0 + p
                if lane % 4 == 3:
                    p = _unflat(line.load(_flat(p, BN).type.layout), p, BN) + p
                if lane % 8 == 7:
                    line_of_p = _flat(p, BN)
                    p = _unflat(gl.load(own + gl.arange(0, 64 * BN, layout=line_of_p.type.layout)), p, BN) + p
                if lane == LANES - 1:
                    out = p
                elif lane % 2 == 0:
                    s0 = p
                elif lane % 4 == 1:
                    if lane == 1:
                        tma.store_wait(0)  # the last tile's output may still be read from this buffer
                    line.store(_flat(p, BN))
                else:
                    line_of_p = _flat(p, BN)
                    gl.store(own + gl.arange(0, 64 * BN, layout=line_of_p.type.layout), line_of_p)
        row, column = tile_m * BM + HALF * 64, tile_n * BN
        if WIDE:
            _store_32_in_quarters(c, acc, row, column, M, N, stride, ADD, BN)
        else:
            if POSITIVE:
                out = (out.to(gl.float32) + 0.0).to(DTYPE)
            _store_16(c, staging, out, row, column, BN, CN)
    tma.store_wait(0)


@gluon.jit
def gemm_kernel(
    a, b, c, scratch, tiles_m, tiles_n, steps, lane_width, segment_width, M, N, stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LANES: gl.constexpr, SEGMENTS: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, DTYPE: gl.constexpr,
    CN: gl.constexpr, C_LAYOUT: gl.constexpr, WIDE: gl.constexpr, ADD: gl.constexpr, POSITIVE: gl.constexpr,
):  # fmt: skip
    """C [M, N] = A B^T in lanes. `a`, `b` (and `c`, unless WIDE) are tensor descriptors, blocks as in `_Plan`."""
    HALF_A: gl.constexpr = [BM // 2, BK] if A_K else [BK, BM // 2]
    ring_a0 = gl.allocate_shared_memory(DTYPE, [STAGES] + HALF_A, a.layout)
    ring_a1 = gl.allocate_shared_memory(DTYPE, [STAGES] + HALF_A, a.layout)
    BLOCK_B: gl.constexpr = [BN, BK] if B_K else [BK, BN]
    ring_b = gl.allocate_shared_memory(DTYPE, [STAGES] + BLOCK_B, b.layout)
    # A tree level and the staged output take turns in one buffer.
    WIDTH: gl.constexpr = BN if LANES > 2 else CN
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    line0 = gl.allocate_shared_memory(DTYPE, [BM // 2 * WIDTH], flat)
    line1 = gl.allocate_shared_memory(DTYPE, [BM // 2 * WIDTH], flat)
    STAGED: gl.constexpr = [BM // 2, CN]
    staging0 = reinterpret(line0, DTYPE, STAGED, C_LAYOUT)
    staging1 = reinterpret(line1, DTYPE, STAGED, C_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                c, staging0, line0, ring_a0, ring_b, full, empty, scratch, tiles_m, tiles_n, steps, M, N,
                stride, 0, BM, BN, STAGES, GROUP, LANES, SEGMENTS, A_K, B_K, DTYPE, CN, WIDE, ADD, POSITIVE,
            )),
            (_consumer, (
                c, staging1, line1, ring_a1, ring_b, full, empty, scratch, tiles_m, tiles_n, steps, M, N,
                stride, 1, BM, BN, STAGES, GROUP, LANES, SEGMENTS, A_K, B_K, DTYPE, CN, WIDE, ADD, POSITIVE,
            )),
            (_producer, (
                a, b, ring_a0, ring_a1, ring_b, full, empty, tiles_m, tiles_n, steps, lane_width, segment_width, 0,
                BM, BN, BK, STAGES, GROUP, LANES, SEGMENTS, A_K, B_K, False,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def obstacle(
    a: torch.Tensor, b: torch.Tensor, *, count: int = 1, segments: int = 1, lane: torch.dtype | None = None
) -> str | None:
    """Why this kernel cannot take a product (the portable one then does), or None.

    Args:
        a, b: [M, K], [N, K], either way round in memory.
        count, segments: lanes of this rank, packed parts of K.
        lane: dtype to which a lane is rounded; this kernel rounds to the operands' own.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} with {b.dtype} {tuple(b.shape)}"
    if a.dtype not in GL_DTYPE:
        return f"operands of {a.dtype}"
    if LANES % count:
        return f"{count} lanes on one rank"
    if lane not in (None, a.dtype):
        return f"lanes of {lane}"
    if min(a.shape[0], b.shape[0]) <= 64 or a.shape[1] < BLOCK_K:
        return "a matrix too small for its tiles"
    if b.shape[0] % 8:
        return f"{b.shape[0]} columns: a row of the result is no multiple of 16 bytes"
    if count * segments > 1 and a.shape[1] % (count * segments * BLOCK_K):
        return f"lanes whose width is no multiple of {BLOCK_K}"
    for name, x in (("first", a), ("second", b)):
        if 1 not in x.stride() or max(x.stride()) % 8 or x.data_ptr() % 16:
            return (
                f"strides {x.stride()} or an address of the {name} operand that its tensor maps cannot have"
            )
    return None


def described(x: torch.Tensor, rows: int) -> tuple[TensorMap, bool]:
    """An operand [M, K] as it lies, in tiles of `rows` by BLOCK_K, and whether K is the contiguous dimension."""
    along_k = x.stride(1) == 1
    shape, strides = (x.shape, x.stride()) if along_k else (x.shape[::-1], x.stride()[::-1])
    block = (rows, BLOCK_K) if along_k else (BLOCK_K, rows)
    return TensorMap(tuple(shape), tuple(strides), block, layout_of(block, x.dtype)), along_k


def described_result(x: torch.Tensor, columns: int) -> TensorMap:
    """A result [M, N], rows contiguous, in tiles of one warpgroup's rows by `columns`."""
    block = (BLOCK_M // 2, columns)
    return TensorMap(tuple(x.shape), x.stride(), block, layout_of(block, x.dtype))


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), GL_DTYPE[dtype])


@functools.cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(tiles_m: int, n: int, lanes: int, wide: bool, processors: int) -> dict[str, Any]:
    """Tile and ring of a product of `n` columns: wide tiles wherever they fill the GPU. Free inside the class."""
    block_n = 256 if tiles_m * triton.cdiv(n, 256) * 4 >= processors * 3 else 128
    if lanes > 2:
        return {"BN": block_n, "STAGES": 3 if block_n == 256 else 5, "GROUP": 4, "CN": block_n}
    return {"BN": block_n, "STAGES": 4 if block_n == 256 else 6, "GROUP": 8, "CN": 64 if wide else 128}


class _Plan:
    """One product with everything decided that does not change from call to call of one signature."""

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, count: int, segments: int, add: bool,
        positive: bool, tile: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        (m, k), n = a.shape, b.shape[0]
        wide = out.dtype == torch.float32
        processors = processors_of(a.device)
        tiles_m = triton.cdiv(m, BLOCK_M)
        chosen = tile or launch(tiles_m, n, count, wide, processors)
        tiles_n = triton.cdiv(n, chosen["BN"])
        map_a, a_k = described(a, BLOCK_M // 2)
        map_b, b_k = described(b, chosen["BN"])
        programs = min(tiles_m * tiles_n, processors)
        # The open level of each thread's tree; every program writes its own before it reads it.
        self.scratch = programs * 2 * 64 * chosen["BN"] if count == 8 else 0
        segment_width = k // segments
        lane_width = segment_width // count
        constants = {
            "BM": BLOCK_M, "BN": chosen["BN"], "BK": BLOCK_K, "STAGES": chosen["STAGES"], "GROUP": chosen["GROUP"],
            "LANES": count, "SEGMENTS": segments, "A_K": a_k, "B_K": b_k, "DTYPE": GL_DTYPE[a.dtype],
            "CN": chosen["CN"], "C_LAYOUT": layout_of((BLOCK_M // 2, chosen["CN"]), a.dtype), "WIDE": wide, "ADD": add,
            "POSITIVE": positive,
        }  # fmt: skip
        steps = triton.cdiv(lane_width, BLOCK_K)
        integers = (tiles_m, tiles_n, steps, lane_width, segment_width, m, n, out.stride(0))
        maps = (map_a, map_b, None if wide else described_result(out, chosen["CN"]), None)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        self.launch = MappedLaunch(gemm_kernel, programs, maps, integers, constants, options)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        scratch = torch.empty(self.scratch, dtype=a.dtype, device=a.device) if self.scratch else a
        self.launch(a, b, out, scratch)


_plans = Plans()


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    count: int = 1,
    segments: int = 1,
    add: bool = False,
    positive: bool = False,
    tile: dict[str, Any] | None = None,
) -> None:
    """``A B^T`` in `count` lanes of `segments` parts into `out`; `obstacle` must have found none.

    Args:
        a, b: [M, K], [N, K] of one 16-bit dtype.
        out: [M, N], rows contiguous: the operands' dtype, or float32 for one lane.
        add: add to `out` (float32 alone).
        positive: make zeros positive after the rounding to 16 bits.
        tile: other values than `launch` gives.
    """
    chosen = None if tile is None else tuple(tile.items())
    key = (a.device, signature(a), signature(b), signature(out), count, segments, add, positive, chosen)
    plan = _plans(key, _Plan, a, b, out, count, segments, add, positive, tile)
    with device_of(a):
        plan(a, b, out)
