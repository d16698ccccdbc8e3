"""Gate and up projection with SwiGLU behind them as one portable Triton kernel: both sides of a tile of columns.

Two chains, each rounded as `kernel.py` rounds one lane, then the activation as `swiglu/kernel.py` computes it. The
projections themselves are written where the backward pass will want them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.gemm.kernel import TL_DTYPE, _round_lane
from te_overrides.kernels.gemm.launch_table import Launch, launch_for
from te_overrides.kernels.gemm.reference import LaneError
from te_overrides.kernels.launching import Launch as PlannedLaunch
from te_overrides.kernels.launching import Plans, device_of, entry_options, signature
from te_overrides.kernels.swiglu.kernel import activated, narrow_gates


@triton.jit
def gated_kernel(
    a,  # [M, K]
    b,  # [2 N, K]: the gate's rows, then the up projection's
    c,  # [M, N]
    packed,  # [M, 2 N], written with KEEP
    M,
    N,
    K,
    a_m,
    a_k,
    b_n,
    b_k,
    c_m,
    packed_m,
    KEEP: tl.constexpr,
    NARROW: tl.constexpr,
    DTYPE: tl.constexpr,
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
    gate_column = b + columns[None, :] * b_n  # [1, BN]
    up_column = gate_column + N.to(tl.int64) * b_n
    row_ok = rows[:, None] < M
    column_ok = columns[None, :] < N
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        at = step * BK + k
        inside = within < K - step * BK
        x = tl.load(a_row + at[None, :] * a_k, row_ok & inside[None, :], 0.0)  # [BM, BK]
        y = tl.load(gate_column + at[:, None] * b_k, column_ok & inside[:, None], 0.0)  # [BK, BN]
        z = tl.load(up_column + at[:, None] * b_k, column_ok & inside[:, None], 0.0)  # [BK, BN]
        gate = tl.dot(x, y, gate)
        up = tl.dot(x, z, up)
    gate = _round_lane(gate, DTYPE, HIP)
    up = _round_lane(up, DTYPE, HIP)
    if KEEP:
        at_packed = packed + rows[:, None] * packed_m + columns[None, :]
        tl.store(at_packed, gate, row_ok & column_ok)
        tl.store(at_packed + N, up, row_ok & column_ok)
    tl.store(c + rows[:, None] * c_m + columns[None, :], activated(gate, up, NARROW), row_ok & column_ok)


def _plan(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, packed: torch.Tensor, keep: bool, entry: Launch | None
) -> PlannedLaunch:
    hip = torch.version.hip is not None
    m, n = c.shape
    entry = entry or launch_for(architecture(a.device), "gated", m)
    grid = (triton.cdiv(m, entry.block_m) * triton.cdiv(n, entry.block_n), 1, 1)
    integers = (m, n, a.shape[1], *a.stride(), *b.stride(), c.stride(0), packed.stride(0))
    return PlannedLaunch(
        gated_kernel, grid, integers, constants(entry, a.dtype, keep, hip), options(entry, hip)
    )


def options(entry: Launch, hip: bool) -> dict[str, object]:
    """Compiler options of a launch entry; the activation's products and sums stay apart."""
    return {**entry_options(entry, hip), "enable_fp_fusion": False}


def constants(entry: Launch, dtype: torch.dtype, keep: bool, hip: bool) -> dict[str, object]:
    """Compile-time arguments of `gated_kernel` for a launch entry."""
    return {
        "KEEP": keep,
        "NARROW": narrow_gates(dtype, hip),
        "DTYPE": TL_DTYPE[dtype],
        "HIP": hip,
        "BM": entry.block_m,
        "BN": entry.block_n,
        "BK": entry.block_k,
        "GROUP": entry.group_m,
    }


_plans = Plans()


def gated(
    a: torch.Tensor, b: torch.Tensor, keep: bool, *, entry: Launch | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SwiGLU of the packed projection on a GPU: [M, N], and [M, 2 N] or None.

    Args:
        a, b: [M, K], [2 N, K] of one 16-bit dtype, any strides.
        keep: whether the projections themselves are wanted.

    Raises:
        LaneError: operands that do not fit.
        NoLaunchError: a GPU without a certified entry.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or b.shape[0] % 2:
        raise LaneError(f"cannot project {tuple(a.shape)} by packed gate and up rows {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise LaneError(f"operands are {a.dtype} and {b.dtype}: the kernel takes two of one 16-bit dtype")
    m, n = a.shape[0], b.shape[0] // 2
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    packed = torch.empty(m, 2 * n, dtype=a.dtype, device=a.device) if keep else None
    if c.numel():
        written = c if packed is None else packed
        key = (a.device, signature(a), signature(b), keep, entry)
        launch = _plans(key, _plan, a, b, c, written, keep, entry)
        with device_of(a):
            launch(a, b, c, written)
    return c, packed
