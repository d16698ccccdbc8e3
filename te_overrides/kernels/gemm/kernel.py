"""The contract's two matrix products as one portable Triton kernel (AMD and NVIDIA).

The accumulator chain runs over K ascending in blocks of BLOCK_K. With eight lanes the tree lives inside the K loop: a
lane ends, its accumulator is rounded once, and the rounded lane meets the open levels of the tree, as in a binary
counter.


    lane   0      1          2      3                  …
    s0     l0     l0+l1 ->   l2     l2+l3 ->
    s1                s1=0+1            (0+1)+(2+3) -> s2

The rounding is opaque to the compiler. A plain conversion lets LLVM sink it past the next lane's loop, which keeps
every lane's float32 accumulator alive (hundreds of spills).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.gemm.launch_table import Launch, launch_for
from te_overrides.kernels.gemm.reference import LANES, LaneError, cut_lanes, lanes_per_rank
from te_overrides.kernels.launching import Launch as PlannedLaunch
from te_overrides.kernels.launching import Plans, device_of, entry_options, signature

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _round_lane(acc, LANE: tl.constexpr, HIP: tl.constexpr):  # [BM, BN] float32 -> [BM, BN] LANE
    if LANE == tl.float32:
        return acc
    elif LANE == tl.bfloat16:
        if HIP:
            # The conversion is the compiler's; the empty instruction hides its result.
            return tl.inline_asm_elementwise(
                "", "=v,0", [acc.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=False, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [acc], dtype=tl.bfloat16, is_pure=False, pack=2
            )
    else:
        if HIP:
            return tl.inline_asm_elementwise(
                "", "=v,0", [acc.to(tl.float16)], dtype=tl.float16, is_pure=False, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [acc], dtype=tl.float16, is_pure=False, pack=2
            )


@triton.jit
def gemm_kernel(
    a,  # [M, K]
    b,  # [N, K]
    c,  # [M, N]
    M,
    N,
    a_m,
    a_k,
    b_n,
    b_k,
    c_m,
    lane_width,  # K of one lane in one segment
    segment_width,  # K of one segment
    COUNT: tl.constexpr,  # lanes of this rank
    SEGMENTS: tl.constexpr,
    LANE: tl.constexpr,
    OUT: tl.constexpr,
    HIP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + program % (GROUP * tiles_n) % height
    tile_n = program % (GROUP * tiles_n) // height
    rows = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tile_n * BN + tl.arange(0, BN)).to(tl.int64)
    within = tl.arange(0, BK)
    k = within.to(tl.int64)
    a_row = a + rows[:, None] * a_m  # [BM, 1]
    b_column = b + columns[None, :] * b_n  # [1, BN]
    row_ok = rows[:, None] < M
    column_ok = columns[None, :] < N
    s0 = tl.zeros((BM, BN), LANE)
    s1 = tl.zeros((BM, BN), LANE)
    s2 = tl.zeros((BM, BN), LANE)
    acc = tl.zeros((BM, BN), tl.float32)
    steps = tl.cdiv(lane_width, BK)
    # One loop over all lanes, so that the pipeline of loads never drains between them.
    for number in range(COUNT * SEGMENTS * steps):
        step = number % steps
        part_of_k = number // steps
        lane = part_of_k // SEGMENTS
        # A tail is masked inside its lane: zeros leave the chain as it is. In 32 bits: 64 cost the registers that the
        # tree needs.
        inside = within < lane_width - step * BK
        at = (part_of_k % SEGMENTS) * segment_width + lane * lane_width + step * BK + k
        x = tl.load(a_row + at[None, :] * a_k, row_ok & inside[None, :], 0.0)  # [BM, BK]
        y = tl.load(b_column + at[:, None] * b_k, column_ok & inside[:, None], 0.0)  # [BK, BN]
        acc = tl.dot(x, y, acc, input_precision="ieee")
        if COUNT > 1:
            if (number + 1) % (SEGMENTS * steps) == 0:
                part = _round_lane(acc, LANE, HIP)
                # A binary counter: the lane's trailing ones say how many levels close here.
                if lane % 2 == 0:
                    s0 = part
                else:
                    part = s0 + part
                    if lane % 4 == 1:
                        s1 = part
                    else:
                        part = s1 + part
                        if lane % 8 == 3:
                            s2 = part
                        else:
                            s0 = s2 + part
                acc = tl.zeros((BM, BN), tl.float32)
    # Where the last lane left the tree's root: the level that it closed, or (of eight) the one that was free.
    if COUNT == 1:
        total = _round_lane(acc, LANE, HIP)
    elif COUNT == 2:
        total = s1
    elif COUNT == 4:
        total = s2
    else:
        total = s0
    tl.store(c + rows[:, None] * c_m + columns[None, :], total.to(OUT), row_ok & column_ok)


def constexprs(
    entry: Launch, *, count: int, segments: int, lane: torch.dtype, out: torch.dtype, hip: bool
) -> dict[str, Any]:
    """Compile-time arguments of `gemm_kernel` for a launch entry."""
    return {
        "COUNT": count,
        "SEGMENTS": segments,
        "LANE": TL_DTYPE[lane],
        "OUT": TL_DTYPE[out],
        "HIP": hip,
        "BM": entry.block_m,
        "BN": entry.block_n,
        "BK": entry.block_k,
        "GROUP": entry.group_m,
    }


def _run(
    a: torch.Tensor, b: torch.Tensor, operation: str, count: int, segments: Sequence[int], lane: torch.dtype,
    out: torch.dtype, entry: Launch | None,
) -> torch.Tensor:  # fmt: skip
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or sum(segments) != a.shape[1]:
        raise LaneError(
            f"cannot contract {tuple(a.shape)} with {tuple(b.shape)} in segments {list(segments)}"
        )
    if a.dtype != b.dtype or a.dtype not in TL_DTYPE:
        raise LaneError(
            f"operands are {a.dtype} and {b.dtype}: the kernel takes two of one dtype, one of {list(TL_DTYPE)}"
        )
    if len(set(segments)) != 1:
        raise LaneError(f"segments {list(segments)} differ in size; lanes take the same slice of each")
    width = cut_lanes(segments[0], count)[0].stop
    c = torch.empty(a.shape[0], b.shape[0], dtype=out, device=a.device)
    if not c.numel():
        return c
    key = (a.device, signature(a), signature(b), operation, count, len(segments), width, lane, out, entry)
    launch = _plans(key, _plan, a, b, c, operation, count, segments, width, lane, entry)
    with device_of(a):
        launch(a, b, c)
    return c


def _plan(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, operation: str, count: int, segments: Sequence[int], width: int,
    lane: torch.dtype, entry: Launch | None,
) -> PlannedLaunch:  # fmt: skip
    hip = torch.version.hip is not None
    m, n = c.shape
    # float32 is there for tests: one small tile, whatever M.
    entry = entry or launch_for(architecture(a.device), operation, 1 if a.dtype is torch.float32 else m)
    grid = (triton.cdiv(m, entry.block_m) * triton.cdiv(n, entry.block_n), 1, 1)
    integers = (m, n, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), width, segments[0])
    constants = constexprs(entry, count=count, segments=len(segments), lane=lane, out=c.dtype, hip=hip)
    return PlannedLaunch(gemm_kernel, grid, integers, constants, entry_options(entry, hip))


_plans = Plans()


def one_lane(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None, *, entry: Launch | None = None
) -> torch.Tensor:
    """``A @ B^T`` as one chain on a GPU, rounded once. See the reference; any strides, nothing is copied.

    Raises:
        LaneError: operands that do not fit.
        NoLaunchError: a GPU without a certified entry.
    """
    return _run(a, b, "one_lane", 1, [a.shape[-1]], torch.float32, dtype or a.dtype, entry)


def lane_tree(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tp_size: int,
    dtype: torch.dtype | None = None,
    segments: Sequence[int] | None = None,
    lanes: int = LANES,
    entry: Launch | None = None,
) -> torch.Tensor:
    """This rank's subtree of the eight-lane contraction on a GPU. See the reference.

    Raises:
        LaneError: a size that the lanes do not divide, or another number of them on a rank than 1, 2, 4 or 8.
        NoLaunchError: a GPU without a certified entry.
    """
    count = lanes_per_rank(tp_size, lanes)
    if LANES % count:
        raise LaneError(
            f"{count} lanes on one rank: the kernel keeps three open levels, for 1, 2, 4 or 8 lanes"
        )
    lane = dtype or a.dtype
    return _run(a, b, "lane_tree", count, list(segments or [a.shape[1]]), lane, lane, entry)
