"""Gate and up projection with SwiGLU behind them for Hopper GPUs, in the bits of the portable kernel.

The product is `hopper.py`'s, half of a tile's columns from the gate's rows and half from the up projection's. What
follows it is activated in registers. Work there is not free, though the two warpgroups take turns: the GPU is at its
power limit while the tensor cores are busy, and a float64 exponential (portable_math) costs as much as a pass of its
own, however well it is hidden. `swiglu/narrow.py` needs it for one element in thousands.
"""

from __future__ import annotations

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

from te_overrides.kernels.gemm import hopper
from te_overrides.kernels.gemm.hopper import (
    BLOCK_K,
    BLOCK_M,
    GL_DTYPE,
    _halves,
    _producer,
    _round,
    _store_16,
    _tile,
    described,
    described_result,
    layout_of,
    processors_of,
)
from te_overrides.kernels.launching import Plans, device_of, signature
from te_overrides.kernels.swiglu.narrow import swiglu
from te_overrides.kernels.tensor_maps import MappedLaunch


@gluon.jit
def _consumer(
    c, packed, staging, ring_a, ring_b, full, empty, tiles_m, tiles_n, steps, N,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_K: gl.constexpr, DTYPE: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SIDE: gl.constexpr = BN // 2
    it = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(t, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([64, BN], gl.float32, layout)
        for step in range(steps):
            slot = it % STAGES
            mbarrier.wait(full.index(slot), (it // STAGES) & 1)
            x = ring_a.index(slot) if A_K else ring_a.index(slot).permute((1, 0))
            acc = warpgroup_mma(x, ring_b.index(slot).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=step > 0)
            it += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
        gate, up = _halves(_round(acc, DTYPE))
        row, column = tile_m * BM + HALF * 64, tile_n * SIDE
        if KEEP:
            # Over the gate's edge a tile has the up projection's first columns, and stores them there.
            _store_16(packed, staging, gate, row, column, SIDE, SIDE)
            _store_16(packed, staging, up, row, N + column, SIDE, SIDE)
        _store_16(c, staging, swiglu(gate, up), row, column, SIDE, SIDE)
    tma.store_wait(0)


@gluon.jit
def gated_kernel(
    a, b, c, packed, tiles_m, tiles_n, steps, lane_width, segment_width, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_K: gl.constexpr, DTYPE: gl.constexpr, C_LAYOUT: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """C [M, N] = silu(A G^T) * (A U^T), B = [G; U] of 2 N rows; KEEP: A B^T goes to `packed` [M, 2 N]."""
    HALF_A: gl.constexpr = [BM // 2, BK] if A_K else [BK, BM // 2]
    ring_a0 = gl.allocate_shared_memory(DTYPE, [STAGES] + HALF_A, a.layout)
    ring_a1 = gl.allocate_shared_memory(DTYPE, [STAGES] + HALF_A, a.layout)
    ring_b = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BK], b.layout)
    staging0 = gl.allocate_shared_memory(DTYPE, [BM // 2, BN // 2], C_LAYOUT)
    staging1 = gl.allocate_shared_memory(DTYPE, [BM // 2, BN // 2], C_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                c, packed, staging0, ring_a0, ring_b, full, empty, tiles_m, tiles_n, steps, N,
                0, BM, BN, STAGES, GROUP, A_K, DTYPE, KEEP,
            )),
            (_consumer, (
                c, packed, staging1, ring_a1, ring_b, full, empty, tiles_m, tiles_n, steps, N,
                1, BM, BN, STAGES, GROUP, A_K, DTYPE, KEEP,
            )),
            (_producer, (
                a, b, ring_a0, ring_a1, ring_b, full, empty, tiles_m, tiles_n, steps, lane_width, segment_width, N,
                BM, BN, BK, STAGES, GROUP, 1, 1, A_K, True, True,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def obstacle(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why this kernel cannot take a packed projection (the portable one then does), or None."""
    if b.dim() == 2 and b.shape[0] % 16:
        return f"{b.shape[0]} packed rows: a row of the result is no multiple of 16 bytes"
    if b.dim() == 2 and b.stride(1) != 1:
        return "gate and up rows that are not contiguous"
    return hopper.obstacle(a, b)


def launch(tiles_m: int, n: int, processors: int) -> dict[str, Any]:
    """Tile and ring of a product of `n` packed rows. Free inside the class."""
    chosen = hopper.launch(tiles_m, n, 1, False, processors)
    return {"BN": chosen["BN"], "STAGES": chosen["STAGES"], "GROUP": 16}


class _Plan(MappedLaunch):
    """One projection with everything decided that does not change from call to call of one signature."""

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, packed: torch.Tensor | None,
        tile: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        (m, k), n = a.shape, out.shape[1]
        processors = processors_of(a.device)
        tiles_m = triton.cdiv(m, BLOCK_M)
        chosen = tile or launch(tiles_m, b.shape[0], processors)
        side = chosen["BN"] // 2
        tiles_n = triton.cdiv(n, side)
        map_a, a_k = described(a, BLOCK_M // 2)
        map_c = described_result(out, side)
        map_packed = map_c if packed is None else described_result(packed, side)
        constants = {
            "BM": BLOCK_M, "BN": chosen["BN"], "BK": BLOCK_K, "STAGES": chosen["STAGES"], "GROUP": chosen["GROUP"],
            "A_K": a_k, "DTYPE": GL_DTYPE[a.dtype], "C_LAYOUT": layout_of((BLOCK_M // 2, side), a.dtype),
            "KEEP": packed is not None,
        }  # fmt: skip
        super().__init__(
            gated_kernel,
            min(tiles_m * tiles_n, processors),
            (map_a, described(b, side)[0], map_c, map_packed),
            (tiles_m, tiles_n, triton.cdiv(k, BLOCK_K), k, k, n),
            constants,
            {"num_warps": 4, "enable_fp_fusion": False},
        )


_plans = Plans()


def gated(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    packed: torch.Tensor | None = None,
    *,
    tile: dict[str, Any] | None = None,
) -> None:
    """``silu(A G^T) * (A U^T)`` into `out`; `obstacle` must have found none.

    Args:
        a: [M, K] of a 16-bit dtype.
        b: [2 N, K], the gate's rows G, then the up projection's rows U; K contiguous.
        out: [M, N], contiguous.
        packed: [M, 2 N] for the projections themselves, where they are wanted.
        tile: other values than `launch` gives.
    """
    key = (
        a.device, signature(a), signature(b), signature(out), None if packed is None else signature(packed),
        None if tile is None else tuple(tile.items()),
    )  # fmt: skip
    plan = _plans(key, _Plan, a, b, out, packed, tile)
    with device_of(a):
        plan(a, b, out, out if packed is None else packed)
