"""Kernels the audit's tests compile; ordinary user code, apart from `n` being a multiple of the block in some."""

import triton
import triton.language as tl

from te_overrides.kernels.portable_math import kernel as portable_math


@triton.jit
def divide64(x_ptr, y_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    x = tl.load(x_ptr + i, i < n)
    y = tl.load(y_ptr + i, i < n)
    tl.store(out_ptr + i, x / y, i < n)


@triton.jit
def root64(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, tl.sqrt(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def divide32_rn(x_ptr, y_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    x = tl.load(x_ptr + i, i < n)
    y = tl.load(y_ptr + i, i < n)
    tl.store(out_ptr + i, tl.div_rn(x, y), i < n)


@triton.jit
def root32_rn(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, tl.sqrt_rn(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def widen_and_round(x_ptr, y_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    """bfloat16 in and out, float64 between, a choice and an integer step."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    x = tl.load(x_ptr + i, i < n).to(tl.float64)
    y = tl.load(y_ptr + i, i < n).to(tl.float64)
    z = tl.where(x > y, x * 3.0 + y, x / (y + 2.0))
    tl.store(out_ptr + i, z.to(tl.float32).to(tl.bfloat16), i < n)


@triton.jit
def row_scale(x_ptr, scale_ptr, out_ptr, n, COLUMNS: tl.constexpr, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    scale = tl.load(scale_ptr + i // COLUMNS, i < n)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < n) * scale, i < n)


@triton.jit
def block_index_leaks(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    """Wrong on purpose: the launch decides what is added."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < n) + tl.program_id(0), i < n)


@triton.jit
def block_total(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    """A reduction over the block: lanes exchange values."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    total = tl.sum(tl.load(x_ptr + i, i < n, 0.0), axis=0)
    tl.store(out_ptr + i, total, i < n)


@triton.jit
def portable_exp(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.exp(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_log(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.log(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_log1p(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.log1p(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_sigmoid(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.sigmoid(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_silu(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.silu(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_rsqrt(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.rsqrt(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_sin(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.sin(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def portable_cos(x_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, portable_math.cos(tl.load(x_ptr + i, i < n)), i < n)


@triton.jit
def gather(x_ptr, index_ptr, out_ptr, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + tl.load(index_ptr + i, i < n), i < n), i < n)


@triton.jit
def gemm(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    blocks = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // blocks) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + (k + inner)[None, :])
        b = tl.load(b_ptr + (k + inner)[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc)


@triton.jit
def score_sums(q_ptr, k_ptr, out_ptr, n, S, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inner = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + inner[None, :])
    total = tl.zeros((BM,), tl.float32)
    for s in range(0, S, BN):
        keys = s + tl.arange(0, BN)
        k = tl.load(k_ptr + keys[None, :] * D + inner[:, None])
        total += tl.sum(tl.exp2(tl.dot(q, k)), axis=1)
    tl.store(out_ptr + rows, total)
