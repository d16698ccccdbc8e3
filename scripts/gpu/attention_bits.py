"""Bit checks of attention_checks.py, by name. Each runs in a process of its own, so that kernels compile side by side.

A case compares results of attention with one base, the whole problem on one rank, and yields
(what, mismatched elements, elements). Ranks of a context- or tensor-parallel group are simulated one after the other:
each gets its own rows and heads, and the gathered operands that its group would bring it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.attention import kernel, ops
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from te_overrides.kernels.attention.launch_table import Entries, entries_for
from te_overrides.kernels.attention.paged import paged_attention
from te_overrides.kernels.attention.reference import Mask
from te_overrides.kernels.attention.runs import Run, runs_of_rank
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.zigzag.reference import rank_positions

Row = tuple[str, int, int]
NAMES = ("out", "lse", "dq", "dk", "dv")
CAUSAL = Mask(None, 0)
DEGREES = (1, 2, 4, 8)


def operands(
    s: int, batch: int, heads: int, groups: int, d: int, dtype: torch.dtype, d_v: int | None = None
) -> list[torch.Tensor]:
    """query, key, value, grad_out on the GPU, standard normal."""
    shapes = [(heads, d), (groups, d), (groups, d_v or d), (heads, d_v or d)]
    return [torch.randn(s, batch, *shape, device="cuda").to(dtype) for shape in shapes]


def everything(
    x: list[torch.Tensor],
    queries: tuple[Run, ...],
    keys: tuple[Run, ...],
    mask: Mask = CAUSAL,
    entries: Entries | None = None,
) -> dict[str, torch.Tensor]:
    """All five results; `entries` leaves the table for portable launches of one's own."""
    q, k, v, grad = x
    out, lse = kernel.attention_forward(q, k, v, queries, mask=mask, entries=entries)
    statistics = kernel.attention_statistics(grad, out, lse)
    dq = kernel.attention_dq(q, k, v, grad, *statistics, queries, mask=mask, entries=entries)
    dk, dv = kernel.attention_dkv(q, k, v, grad, *statistics, keys, mask=mask, entries=entries)
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def whole(s: int) -> tuple[Run, ...]:
    return (Run(0, s, 0, 0, s),)


def compare(what: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> Iterator[Row]:
    for name, x in got.items():
        mismatched, elements, _ = count_mismatches(x, want[name])
        yield f"{what}: {name}", mismatched, elements


def shard(x: torch.Tensor, size: int, rank: int, dim: int = 2) -> torch.Tensor:
    return x.chunk(size, dim)[rank].contiguous()


def layouts(d: int, dtype: torch.dtype, s: int, mask: Mask) -> Iterator[Row]:
    """CP and TP degrees in both layouts."""
    x = operands(s, 2, 16, 8, d, dtype)
    base = everything(x, whole(s), whole(s), mask)
    shift, delta = ops.attention_statistics(x[3], base["out"], base["lse"])
    for cp, tp, layout in itertools.product(DEGREES, DEGREES, ("zigzag", "contiguous")):
        counts: dict[str, list[int]] = {name: [0, 0] for name in NAMES}
        for rank, tp_rank in itertools.product(range(cp), range(tp)):
            q, k, v, grad = (shard(t, tp, tp_rank) for t in x)
            rows = rank_positions(s, cp, rank, layout).cuda()
            runs = runs_of_rank(s, s, cp, rank, layout, 0, 0)
            out, lse = ops.attention_forward(q[rows], k, v, runs, mask=mask)
            own = ops.attention_statistics(grad[rows], out, lse)
            dq = ops.attention_dq(q[rows], k, v, grad[rows], *own, runs, mask=mask)
            gathered = (shard(shift, tp, tp_rank, 1), shard(delta, tp, tp_rank, 1))
            dk, dv = ops.attention_dkv(q, k[rows], v[rows], grad, *gathered, runs, mask=mask)
            for name, part in zip(NAMES, (out, lse, dq, dk, dv), strict=True):
                dim = 1 if name == "lse" else 2
                want = shard(base[name], tp, tp_rank, dim)
                want = want[..., rows] if name == "lse" else want[rows]
                mismatched, elements, _ = count_mismatches(part, want)
                counts[name][0] += mismatched
                counts[name][1] += elements
        for name, (mismatched, elements) in counts.items():
            yield f"S={s} window {mask.left} CP={cp} TP={tp} {layout}: {name}", mismatched, elements


def batch_and_repeats(d: int, dtype: torch.dtype) -> Iterator[Row]:
    """A sequence alone, among others, and 100 times while other work disturbs the GPU."""
    s = 1040
    x = operands(s, 3, 8, 2, d, dtype)
    base = everything(x, whole(s), whole(s))
    for batch in range(3):
        alone = everything([t[:, batch : batch + 1].contiguous() for t in x], whole(s), whole(s))
        want = {n: t[batch : batch + 1] if n == "lse" else t[:, batch : batch + 1] for n, t in base.items()}
        yield from compare(f"sequence {batch} alone", alone, want)
    order = [2, 0, 1, 2]
    many = everything([t[:, order].contiguous() for t in x], whole(s), whole(s))
    want = {n: t[order] if n == "lse" else t[:, order] for n, t in base.items()}
    yield from compare("another batch", many, want)
    streams = [torch.cuda.Stream() for _ in range(3)]
    noise = torch.randn(2048, 2048, device="cuda")
    counts = dict.fromkeys(NAMES, 0)
    for repeat in range(100):
        with torch.cuda.stream(streams[repeat % 2]):
            for _ in range(repeat % 5):
                noise = (noise @ noise).clamp(-1, 1)
        with torch.cuda.stream(streams[2]):
            again = everything(x, whole(s), whole(s))
            for name in NAMES:
                counts[name] += count_mismatches(again[name], base[name])[0]
        torch.cuda.synchronize()
    for name in NAMES:
        yield f"100 repeats beside other work: {name}", counts[name], 100 * base[name].numel()
    leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
    out, lse = context_parallel_attention(*leaves, layout="zigzag")
    out.backward(x[3])
    through = dict(zip(NAMES, (out, lse, *(t.grad for t in leaves)), strict=True))
    yield from compare("through autograd", through, base)


def tiles(d: int, dtype: torch.dtype, problems: str, d_v: int | None = None) -> Iterator[Row]:
    """The portable launches and free variations of them against what the device dispatches to."""
    arch = architecture(torch.device("cuda", 0))
    entries = entries_for(arch, d)
    few = replace(entries.forward, rows=64, num_warps=4) if arch == "sm_90" else entries.forward
    branch = arch == "sm_90" and not entries.forward.branch
    variants = {
        "portable table": entries,
        "other tiles": Entries(
            forward=replace(few, branch=branch),
            decode=entries.decode,
            dq=replace(entries.dq, num_stages=1, columns=32, branch=branch),
            dkv=replace(entries.dkv, columns=16, rows=64, branch=branch),
        ),
    }
    for s, mask in PROBLEMS[problems]:
        x = operands(s, 1, 8, 2, d, dtype, d_v)
        base = everything(x, whole(s), whole(s), mask)
        for name, entry in variants.items():
            got = everything(x, whole(s), whole(s), mask, entry)
            yield from compare(f"{name}, S={s} {mask}", got, base)
        if kernel._hopper(None, *x) is not None:
            yield from _hopper_keys(x, s, mask, base)


def _hopper_keys(x: list[torch.Tensor], s: int, mask: Mask, base: dict[str, torch.Tensor]) -> Iterator[Row]:
    from te_overrides.kernels.attention import hopper
    from te_overrides.kernels.attention.coverage import require_covered
    from te_overrides.kernels.attention.runs import reach

    problem = require_covered(x[0], x[1], x[2], None)
    statistics = kernel.attention_statistics(x[3], base["out"], base["lse"])
    for keys in (64, 128):
        dk, dv = torch.full_like(x[1], torch.nan), torch.full_like(x[2], torch.nan)
        hopper.dkv(*x, *statistics, dk, dv, whole(s), reach(mask), problem, keys)
        yield from compare(f"{keys} keys a program, S={s} {mask}", {"dk": dk, "dv": dv}, base)


def packed(d: int, dtype: torch.dtype) -> Iterator[Row]:
    """Sequences on one axis with NaN between them, some empty, against each alone and over CP degrees."""
    lengths = [300, 0, 77, 1, 512, 0, 129, 1000, 16]
    padded = [-(-n // 16) * 16 for n in lengths]
    starts = [sum(padded[:i]) for i in range(len(padded) + 1)]
    cumulative = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    total = starts[-1]
    x = operands(total, 1, 8, 2, d, dtype)
    real = torch.zeros(total, dtype=torch.bool, device="cuda")
    for start, n in zip(starts, lengths, strict=False):
        real[start : start + n] = True
    for t in x:
        t[~real] = torch.nan
    leaves = [t.squeeze(1).clone().requires_grad_() for t in x[:3]]
    out, lse = packed_attention(*leaves, cu_seqlens=cumulative, cu_seqlens_padded=starts)
    out.backward(x[3].squeeze(1))
    got = dict(zip(NAMES, (out.detach(), lse, *(t.grad for t in leaves)), strict=True))
    for start, n in zip(starts, lengths, strict=False):
        if n:
            rows = slice(start, start + n)
            alone = everything([t[rows].contiguous() for t in x], whole(n), whole(n))
            part = {
                m: t[:, rows].unsqueeze(0) if m == "lse" else t[rows].unsqueeze(1) for m, t in got.items()
            }
            yield from compare(f"{n} tokens packed", part, alone)
    for name, t in got.items():
        pad = t[:, ~real] if name == "lse" else t[~real]
        wrong = (pad != -torch.inf) if name == "lse" else (pad != 0)
        yield f"padding: {name}", int(wrong.sum()), pad.numel()
    clean = [torch.where(real[:, None, None, None], t, torch.zeros_like(t)) for t in x]
    runs = tuple(Run(a, n, 0, a, n) for a, n in zip(starts, lengths, strict=False))
    yield from compare(
        "zeros in the padding",
        everything(clean, runs, runs),
        {m: t.unsqueeze(0) if m == "lse" else t.unsqueeze(1) for m, t in got.items()},
    )


def decode(d: int, dtype: torch.dtype) -> Iterator[Row]:
    """Last rows alone, and over shuffled pages in place, against prefill; NaN where no key was written."""
    lengths, page = [1, 64, 129, 1000, 0, 517], 16
    tables = [-(-n // page) for n in lengths]
    places = torch.randperm(sum(tables) + 5).tolist()
    for heads, groups in ((8, 2), (4, 4), (8, 1)):
        keys = torch.full((len(places), page, groups, d), torch.nan, device="cuda", dtype=dtype)
        values = keys.clone()
        table = torch.full((len(lengths), max(tables)), -1, dtype=torch.int32)
        sequences = [operands(max(n, 1), 1, heads, groups, d, dtype) for n in lengths]
        for index, n in enumerate(lengths):
            for j in range(tables[index]):
                place = table[index, j] = places[sum(tables[:index]) + j]
                rows = slice(j * page, min((j + 1) * page, n))
                for cache, t in ((keys, sequences[index][1]), (values, sequences[index][2])):
                    cache[place, : rows.stop - rows.start] = t[rows, 0]
        for s_q in (1, 5, 40):
            query = torch.zeros(len(lengths), s_q, heads, d, device="cuda", dtype=dtype)
            for index, n in enumerate(lengths):
                rows = min(n, s_q)
                query[index, s_q - rows :] = sequences[index][0][n - rows : n, 0]
            out, lse = paged_attention(
                query, keys, values, block_table=table.cuda(), seq_lens=torch.tensor(lengths).cuda()
            )
            for index, n in enumerate(lengths):
                rows = min(n, s_q)
                if rows:
                    q, k, v, _ = sequences[index]
                    want, want_lse = ops.attention_forward(q, k, v, whole(n), mask=CAUSAL)
                    base = {"out": want[n - rows :, 0], "lse": want_lse[0, :, n - rows :]}
                    part = {"out": out[index, s_q - rows :], "lse": lse[index, :, s_q - rows :]}
                    yield from compare(f"{heads}/{groups} heads, {s_q} rows of {n} over pages", part, base)
                    last = (Run(0, rows, n - rows, 0, n),)
                    tail = ops.attention_forward(q[n - rows : n], k, v, last, mask=CAUSAL)
                    part = {"out": tail[0][:, 0], "lse": tail[1][0]}
                    yield from compare(f"{heads}/{groups} heads, {s_q} rows of {n} alone", part, base)
                blank = out[index, : s_q - rows]
                yield f"rows before a sequence of {n}", int(blank.count_nonzero()), blank.numel()


def mutant(d: int, dtype: torch.dtype) -> Iterator[Row]:
    """Half the keys in a tile: another class. The row counts as wrong if nothing differs."""
    entries = entries_for(architecture(torch.device("cuda", 0)), d)
    half = replace(entries.forward, columns=entries.forward.columns // 2)
    x = operands(1024, 1, 4, 1, d, dtype)
    base = everything(x, whole(1024), whole(1024))
    got = everything(x, whole(1024), whole(1024), entries=replace(entries, forward=half, decode=half))
    differ = count_mismatches(got["lse"], base["lse"])[0]
    yield f"another number of keys in a tile goes unnoticed ({differ} differ)", int(differ == 0), 1


PROBLEMS = {
    "causal": ((1040, CAUSAL), (640, CAUSAL)),
    "full": ((777, Mask()), (512, Mask())),
    "window": ((1000, Mask(129, 0)), (640, Mask(70, 33))),
}
# A length whose chunks end inside tiles, and one whose chunks are tiles.
WINDOW = Mask(300, 0)
BF16, FP16 = torch.bfloat16, torch.float16
CASES: dict[str, tuple[Callable[..., Iterator[Row]], tuple[Any, ...]]] = {
    **{
        f"layouts, d {d}, {name}, S {s}, window {mask.left}": (layouts, (d, dtype, s, mask))
        for (d, name, dtype), s, mask in itertools.product(
            ((128, "bf16", BF16), (64, "fp16", FP16), (96, "bf16", BF16)), (1040, 2048), (CAUSAL, WINDOW)
        )
    },
    **{
        f"tiles, d {d}, {name}, {problems}": (tiles, (d, dtype, problems))
        for (d, name, dtype), problems in itertools.product(
            ((128, "bf16", BF16), (128, "fp16", FP16), (64, "bf16", BF16), (256, "bf16", BF16)), PROBLEMS
        )
    },
    "tiles, d 192, values 128, causal": (tiles, (192, BF16, "causal", 128)),
    "tiles, d 192, values 128, window": (tiles, (192, BF16, "window", 128)),
    "batch and repeats, d 128": (batch_and_repeats, (128, BF16)),
    "batch and repeats, d 256": (batch_and_repeats, (256, BF16)),
    "packed, d 128": (packed, (128, BF16)),
    "packed, d 64": (packed, (64, BF16)),
    "packed, d 192": (packed, (192, BF16)),
    "decode, d 128": (decode, (128, BF16)),
    "decode, d 256": (decode, (256, BF16)),
    "a mutant is caught": (mutant, (128, BF16)),
}
