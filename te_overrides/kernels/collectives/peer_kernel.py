"""Collectives over memory that every rank of a node can read, each in one launch: stage, meet, read in rank order, add.

A program of one rank works with the programs of the same number on the other ranks and with no others. It copies its
pieces into its own rank's staging buffer, tells its counterparts, waits for them, and reads their pieces. The sum is
the balanced tree over ranks (te_overrides/kernels/tree), one rounding an addition; nothing depends on who came first.

Flags: ``flags[rank]`` is that rank's table of [phase, program, from] words. A counterpart sets a word from 0 to 1, its
owner sets it back: an atomic exchange with release, one with acquire, both at system scope. Staging has two halves that
calls take in turn, by a number in device memory, so that a captured graph replays correctly: when a rank writes a half
again, everybody has met it in the call between, and had therefore left the call before.

A counterpart that does not come within `limit` ticks of the device's clock ends the wait: its rank (plus one) is stored
in `missing`, which the host can read, and the result is not to be used. Triton's interpreter has no clock: attempts are
its ticks.

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
def _now(TARGET: tl.constexpr):
    """Ticks of a clock that all multiprocessors share: nanoseconds on CUDA, hundredths of microseconds on AMD."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], tl.int64, is_pure=False, pack=1
        )


@triton.jit
def _in_vain(
    word, expected: tl.constexpr, wanted: tl.constexpr, limit, SEM: tl.constexpr, TARGET: tl.constexpr
):
    """Set a word from `expected` to `wanted` once it is `expected`; true where `limit` ticks passed without it."""
    waited = tl.zeros([], tl.int64)
    began = waited
    if TARGET != "":
        began = _now(TARGET)
    found = tl.atomic_cas(word, expected, wanted, sem=SEM, scope="sys")
    while (found != expected) & (waited < limit):
        if TARGET != "":
            waited = _now(TARGET) - began
        else:
            waited += 1
        found = tl.atomic_cas(word, expected, wanted, sem=SEM, scope="sys")
    return found != expected


@triton.jit
def _meet(flags, missing, rank, phase, limit, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Tell the counterparts that this program is here, then wait for them; what they wrote before is visible after."""
    if TARGET == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    row = (phase * tl.num_programs(0) + tl.program_id(0)) * WORLD
    for other in tl.static_range(WORLD):
        word = _table(flags, other) + row + rank
        if _in_vain(word, 0, 1, limit, "release", TARGET):
            tl.store(missing, other + 1)
    for other in tl.static_range(WORLD):
        word = _table(flags, rank) + row + other
        if _in_vain(word, 1, 0, limit, "acquire", TARGET):
            tl.store(missing, other + 1)
    tl.debug_barrier()


@triton.jit
def _turn_over(state):
    """The last program to end a call lets the next one take the other half. `state`: [turn, programs that ended]."""
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, tl.load(state) + 1)


@triton.jit
def _half(staging, rank, turn, half_bytes, DTYPE: tl.constexpr):
    """Pointer to the half of a rank's staging buffer that this call uses."""
    return (tl.load(staging + rank) + (turn & 1) * half_bytes).to(tl.pointer_type(DTYPE))


@triton.jit
def _sum_of_ranks(
    x, staging, rank, turn, half_bytes, at, inside,
    WORLD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The tree over ranks of the elements `at` [BLOCK], in DTYPE: this rank's from `x`, the others' as staged.

    ADDED: dtype that every sum is rounded to.
    """
    ranks = tl.arange(0, WORLD)
    bases = tl.where(ranks == rank, x.to(tl.int64), tl.load(staging + ranks) + (turn & 1) * half_bytes)
    bases = bases.to(tl.pointer_type(DTYPE))
    terms = tl.load(bases[None, :] + at[:, None], mask=inside[:, None], other=0.0)  # [BLOCK, WORLD]
    return rounded(tree_of_rows(terms.to(tl.float32), LEVELS, ADDED), DTYPE)


@triton.jit(do_not_specialize=["rank", "share", "half_bytes", "limit"])
def reduce_scatter_kernel(
    x, out, staging, flags, state, missing, rank, share, half_bytes, limit,
    WORLD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """x [WORLD * share] -> out [share]: this rank's share of the tree over ranks.

    staging, flags: int64 addresses, one a rank. state: int32 [2]. missing: int32 [1], readable by the host.
    """
    turn = tl.load(state)
    mine = _half(staging, rank, turn, half_bytes, DTYPE)
    blocks = tl.cdiv(share, BLOCK)
    for destination in tl.static_range(WORLD):
        if destination != rank:
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                piece = destination * tl.cast(share, tl.int64) + at
                tl.store(mine + piece, tl.load(x + piece, mask=at < share), mask=at < share)
    _meet(flags, missing, rank, 0, limit, WORLD, TARGET)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < share
        piece = rank * tl.cast(share, tl.int64) + at
        total = _sum_of_ranks(x, staging, rank, turn, half_bytes, piece, inside, WORLD, LEVELS, DTYPE, ADDED)
        tl.store(out + at, total, mask=inside)
    _turn_over(state)


@triton.jit(do_not_specialize=["rank", "count", "half_bytes", "limit"])
def all_reduce_kernel(
    x, out, staging, flags, state, missing, rank, count, half_bytes, limit,
    WORLD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
    TARGET: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [count]: the tree over ranks, on every rank.

    SHARED: a block is added by one rank, over its own staging, and read by the others after a second meeting; without
    it every rank adds everything, which saves the meeting and reads WORLD times as much.
    """
    turn = tl.load(state)
    mine = _half(staging, rank, turn, half_bytes, DTYPE)
    blocks = tl.cdiv(count, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x + at, mask=at < count), mask=at < count)
    _meet(flags, missing, rank, 0, limit, WORLD, TARGET)
    if SHARED:
        # Blocks of one program are shared out in turn; adding over its own staging needs no other rank's leave, for
        # nobody else reads this block of it before the second meeting.
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
        _meet(flags, missing, rank, 1, limit, WORLD, TARGET)
        number = 0
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            theirs = _half(staging, number % WORLD, turn, half_bytes, DTYPE)
            tl.store(out + at, tl.load(theirs + at, mask=at < count), mask=at < count)
            number += 1
    else:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            total = _sum_of_ranks(x, staging, rank, turn, half_bytes, at, inside, WORLD, LEVELS, DTYPE, ADDED)
            tl.store(out + at, total, mask=inside)
    _turn_over(state)


@triton.jit(do_not_specialize=["rank", "count", "half_bytes", "limit"])
def all_gather_kernel(
    x, out, staging, flags, state, missing, rank, count, half_bytes, limit,
    WORLD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [WORLD * count], in rank order. Bytes: DTYPE is an integer type."""
    turn = tl.load(state)
    mine = _half(staging, rank, turn, half_bytes, DTYPE)
    blocks = tl.cdiv(count, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x + at, mask=at < count), mask=at < count)
    _meet(flags, missing, rank, 0, limit, WORLD, TARGET)
    for source in tl.static_range(WORLD):
        theirs = _half(staging, source, turn, half_bytes, DTYPE)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            piece = tl.load(theirs + at, mask=at < count)
            tl.store(out + source * tl.cast(count, tl.int64) + at, piece, mask=at < count)
    _turn_over(state)
