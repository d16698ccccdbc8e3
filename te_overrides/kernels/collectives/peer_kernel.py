"""Collectives over memory that every rank of a node can read, each in one launch: stage, meet, read in rank order, add.

A program of one rank works with the programs of the same number on the other ranks and with no others. It copies its
pieces into its own rank's staging buffer, tells its counterparts, waits for them, and reads their pieces. The sum is
the balanced tree over ranks (te_overrides/kernels/tree), one rounding an addition; nothing depends on who came first.

Flags: ``flags[rank]`` is that rank's table of [phase, program, from] words. A counterpart sets a word from 0 to 1, its
owner sets it back: an atomic exchange with release, one with acquire, both at system scope. Staging has two halves that
calls take in turn, by a number in device memory, so that a captured graph replays correctly: when a rank writes a half
again, everybody has met it in the call between, and had therefore left the call before.

A call waits `limit` ticks of the device's clock, all its meetings together. A counterpart that has not come by then is
missed: its rank (plus one) is stored in `missing`, which the host can read, and the last program of the call to end
fills all of `out` with NaN (with bytes of ones where it is moved as bytes, which is NaN in every floating dtype). The
rank is out of step with the others from then on. Every later call fills its `out` likewise, at once: it neither waits,
nor writes into staging that a late counterpart may still read, nor tells anybody that it is there, so that the others
miss it in turn. Triton's interpreter has no clock: attempts are its ticks.

Before the barrier in front of a flag every wave waits for its own stores. On CUDA the barrier orders them before the
release of the thread that sets the flag. On AMD it waits for shared memory alone, and the release waits for the stores
of its own wave alone.

Integers are not specialized: where ranks share a process, loading another variant would wait for the device, that is
for a kernel which waits for the one to be loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_overrides.kernels.rounding.kernel import rounded
from te_overrides.kernels.tree.kernel import tree_of_rows


@triton.jit
def _table(tables, rank):
    """Pointer to a rank's table of words."""
    return tl.load(tables + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def _now(TARGET: tl.constexpr, THREADS: tl.constexpr):
    """Ticks of a clock that all multiprocessors share: nanoseconds on CUDA, hundredths of microseconds on AMD.

    One number for all THREADS threads of the program: each reads the clock at another time, and threads that
    disagreed about the end of a wait would part ways in front of a barrier.
    """
    threads = tl.arange(0, THREADS)
    if TARGET == "cuda":
        clock = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [threads], tl.int64, is_pure=False, pack=1
        )
    else:
        clock = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s,v", [threads], tl.int64, is_pure=False, pack=1
        )
    return tl.max(clock, axis=0)


@triton.jit
def _wait(
    word, expected: tl.constexpr, wanted: tl.constexpr, left, SEM: tl.constexpr, TARGET: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Set a word from `expected` to `wanted` once it is `expected`; what remains of `left` ticks, -1 if in vain."""
    found = tl.atomic_cas(word, expected, wanted, sem=SEM, scope="sys")
    if found != expected:
        until = left
        if TARGET != "":
            until += _now(TARGET, THREADS)
        while (found != expected) & (left > 0):
            if TARGET != "":
                left = until - _now(TARGET, THREADS)
            else:
                left -= 1
            found = tl.atomic_cas(word, expected, wanted, sem=SEM, scope="sys")
        left = tl.where(found == expected, tl.maximum(left, 0), -1)
    return left


@triton.jit
def _every_store_of_this_program(TARGET: tl.constexpr):
    """Every wave waits for its own stores; see the top."""
    if TARGET == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def _meet(
    flags, missing, rank, phase, left, WORLD: tl.constexpr, TARGET: tl.constexpr, THREADS: tl.constexpr
):
    """Tell the counterparts that this program is here, then wait for them; what they wrote before is visible after.

    Returns the ticks that are left of `left`, or -1 where a counterpart was missed. Nobody is told, or waited for,
    after that.
    """
    _every_store_of_this_program(TARGET)
    row = (phase * tl.num_programs(0) + tl.program_id(0)) * WORLD
    for other in tl.static_range(WORLD):
        if left >= 0:
            word = _table(flags, other) + row + rank
            left = _wait(word, 0, 1, left, "release", TARGET, THREADS)
            if left < 0:
                tl.store(missing, other + 1)
    for other in tl.static_range(WORLD):
        if left >= 0:
            word = _table(flags, rank) + row + other
            left = _wait(word, 1, 0, left, "acquire", TARGET, THREADS)
            if left < 0:
                tl.store(missing, other + 1)
    tl.debug_barrier()
    return left


@triton.jit
def _ticks(turn, limit):
    """Ticks that a call may wait: -1 where a rank was missed before."""
    return tl.where(turn >= 0, tl.cast(limit, tl.int64), -1)


@triton.jit
def _end(
    state, turn, left, out, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
    MOST: tl.constexpr = 65536,
):  # fmt: skip
    """The last program to end a call lets the next one take the other half; if one missed a rank, no result is left.

    Args:
        state: [turn, programs that ended]. The turn is 0, 1, or -1 for good once a rank was missed. It is written when
            no other program of the call can read it. A program that missed a rank counts MOST more.
        out: [count] of DTYPE, all that the call has written.
    """
    # What was written into `out` must not arrive after the NaN.
    _every_store_of_this_program(TARGET)
    ended = tl.atomic_add(state + 1, tl.where(left < 0, 1 + MOST, 1), sem="acq_rel", scope="gpu")
    if ended % MOST == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        if (ended >= MOST) | (left < 0):
            tl.store(state, -1)
            for block in range(tl.cdiv(count, BLOCK)):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                if DTYPE.is_floating():
                    tl.store(out + at, tl.full([BLOCK], float("nan"), DTYPE), mask=at < count)
                else:
                    tl.store(out + at, tl.full([BLOCK], -1, tl.int64).to(DTYPE), mask=at < count)
        else:
            tl.store(state, 1 - turn)


@triton.jit
def _half(staging, rank, turn, half_bytes, DTYPE: tl.constexpr):
    """Pointer to the half of a rank's staging buffer that this call uses."""
    return (tl.load(staging + rank) + turn * half_bytes).to(tl.pointer_type(DTYPE))


@triton.jit
def _sum_of_ranks(
    x, staging, rank, turn, half_bytes, at, inside,
    WORLD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The tree over ranks of the elements `at` [BLOCK], in DTYPE: this rank's from `x`, the others' as staged.

    ADDED: dtype that every sum is rounded to.
    """
    ranks = tl.arange(0, WORLD)
    bases = tl.where(ranks == rank, x.to(tl.int64), tl.load(staging + ranks) + turn * half_bytes)
    bases = bases.to(tl.pointer_type(DTYPE))
    terms = tl.load(bases[None, :] + at[:, None], mask=inside[:, None], other=0.0)  # [BLOCK, WORLD]
    return rounded(tree_of_rows(terms.to(tl.float32), LEVELS, ADDED), DTYPE)


@triton.jit(do_not_specialize=["rank", "share", "half_bytes", "limit"])
def reduce_scatter_kernel(
    x, out, staging, flags, state, missing, rank, share, half_bytes, limit,
    WORLD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
    TARGET: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """x [WORLD * share] -> out [share]: this rank's share of the tree over ranks.

    staging, flags: int64 addresses, one a rank. state: int32 [2], see `_end`. missing: int32 [1], readable by the host.
    """
    turn = tl.load(state)
    left = _ticks(turn, limit)
    blocks = tl.cdiv(share, BLOCK)
    if left >= 0:
        mine = _half(staging, rank, turn, half_bytes, DTYPE)
        for destination in tl.static_range(WORLD):
            if destination != rank:
                for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                    piece = destination * tl.cast(share, tl.int64) + at
                    tl.store(mine + piece, tl.load(x + piece, mask=at < share), mask=at < share)
    left = _meet(flags, missing, rank, 0, left, WORLD, TARGET, THREADS)
    if left >= 0:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < share
            piece = rank * tl.cast(share, tl.int64) + at
            total = _sum_of_ranks(
                x, staging, rank, turn, half_bytes, piece, inside, WORLD, LEVELS, DTYPE, ADDED
            )
            tl.store(out + at, total, mask=inside)
    _end(state, turn, left, out, share, DTYPE, BLOCK, TARGET)


@triton.jit(do_not_specialize=["rank", "count", "half_bytes", "limit"])
def all_reduce_kernel(
    x, out, staging, flags, state, missing, rank, count, half_bytes, limit,
    WORLD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
    TARGET: tl.constexpr, THREADS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [count]: the tree over ranks, on every rank.

    SHARED: a block is added by one rank, over its own staging, and read by the others after a second meeting; without
    it every rank adds everything, which saves the meeting and reads WORLD times as much.
    """
    turn = tl.load(state)
    left = _ticks(turn, limit)
    blocks = tl.cdiv(count, BLOCK)
    if left >= 0:
        mine = _half(staging, rank, turn, half_bytes, DTYPE)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(mine + at, tl.load(x + at, mask=at < count), mask=at < count)
    left = _meet(flags, missing, rank, 0, left, WORLD, TARGET, THREADS)
    if SHARED:
        if left >= 0:
            # Blocks of one program are shared out in turn; adding over its own staging needs no other rank's leave, for
            # nobody else reads this block of it before the second meeting.
            mine = _half(staging, rank, turn, half_bytes, DTYPE)
            number = 0
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                if number % WORLD == rank:
                    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                    inside = at < count
                    total = _sum_of_ranks(
                        x, staging, rank, turn, half_bytes, at, inside, WORLD, LEVELS, DTYPE, ADDED
                    )
                    tl.store(mine + at, total, mask=inside)
                number += 1
        left = _meet(flags, missing, rank, 1, left, WORLD, TARGET, THREADS)
        if left >= 0:
            number = 0
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                theirs = _half(staging, number % WORLD, turn, half_bytes, DTYPE)
                tl.store(out + at, tl.load(theirs + at, mask=at < count), mask=at < count)
                number += 1
    else:
        if left >= 0:
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                inside = at < count
                total = _sum_of_ranks(
                    x, staging, rank, turn, half_bytes, at, inside, WORLD, LEVELS, DTYPE, ADDED
                )
                tl.store(out + at, total, mask=inside)
    _end(state, turn, left, out, count, DTYPE, BLOCK, TARGET)


@triton.jit(do_not_specialize=["rank", "count", "half_bytes", "limit"])
def all_gather_kernel(
    x, out, staging, flags, state, missing, rank, count, half_bytes, limit,
    WORLD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [WORLD * count], in rank order. Bytes: DTYPE is an integer type."""
    turn = tl.load(state)
    left = _ticks(turn, limit)
    blocks = tl.cdiv(count, BLOCK)
    if left >= 0:
        mine = _half(staging, rank, turn, half_bytes, DTYPE)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(mine + at, tl.load(x + at, mask=at < count), mask=at < count)
    left = _meet(flags, missing, rank, 0, left, WORLD, TARGET, THREADS)
    if left >= 0:
        for source in tl.static_range(WORLD):
            theirs = _half(staging, source, turn, half_bytes, DTYPE)
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                piece = tl.load(theirs + at, mask=at < count)
                tl.store(out + source * tl.cast(count, tl.int64) + at, piece, mask=at < count)
    _end(state, turn, left, out, WORLD * tl.cast(count, tl.int64), DTYPE, BLOCK, TARGET)
