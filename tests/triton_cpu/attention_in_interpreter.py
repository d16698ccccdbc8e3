"""Runs the attention kernels in Triton's interpreter and prints, as JSON, how far they are from the reference.

Started by a test as a process of its own with TRITON_INTERPRET=1, which Triton reads when it is imported. The
interpreter multiplies matrices with numpy, so its bits are nobody's: a tile's own arithmetic is compared by error
against the reference, and what must be equal (layouts, batch, heads, tiles of rows) is compared by bits within it.
Operands are float16: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from te_overrides.kernels.attention import kernel, reference
from te_overrides.kernels.attention.launch_table import Entries, Launch
from te_overrides.kernels.attention.reference import Mask
from te_overrides.kernels.attention.runs import Run, runs_of
from te_overrides.kernels.bits import count_mismatches

SMALL = Entries(Launch(32, 32, 1, 1), Launch(16, 32, 1, 1), Launch(32, 32, 1, 1), Launch(32, 16, 1, 1))
NAMES = ("out", "lse", "dq", "dk", "dv")


def operands(
    s_q: int, s_k: int, batch: int, heads: int, groups: int, d: int, d_v: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """query, key, value, grad_out."""
    generator = torch.Generator().manual_seed(s_q + 7 * s_k + heads + d)
    shapes = [
        (s_q, batch, heads, d),
        (s_k, batch, groups, d),
        (s_k, batch, groups, d_v),
        (s_q, batch, heads, d_v),
    ]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def by_kernel(
    x: list[torch.Tensor],
    queries: tuple[Run, ...],
    keys: tuple[Run, ...],
    mask: Mask,
    entries: Entries = SMALL,
) -> dict[str, torch.Tensor]:
    """All five results from the kernels."""
    q, k, v, grad = x
    out, lse = kernel.attention_forward(q, k, v, queries, mask=mask, entries=entries)
    rows = kernel.attention_statistics(grad, out, lse)
    dq = kernel.attention_dq(q, k, v, grad, *rows, queries, mask=mask, entries=entries)
    dk, dv = kernel.attention_dkv(q, k, v, grad, *rows, keys, mask=mask, entries=entries)
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def by_reference(
    x: list[torch.Tensor], positions: torch.Tensor, keys: torch.Tensor, mask: Mask
) -> dict[str, torch.Tensor]:
    """All five results from the reference."""
    q, k, v, grad = x
    out, lse = reference.attention_forward(q, k, v, positions, mask=mask)
    delta = reference.attention_delta(grad, out)
    dq = reference.attention_dq(q, k, v, grad, lse, delta, positions, mask=mask)
    dk, dv = reference.attention_dkv(q, k, v, grad, lse, delta, keys, mask=mask)
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative distance in the Frobenius norm; infinite values must be in the same places."""
    error = torch.where(got == want, 0.0, got.double() - want.double()).norm()
    return float(error / want[want.isfinite()].double().norm().clamp(min=1e-30))


def against_reference() -> dict[str, dict[str, float]]:
    """Case -> distance of each result."""
    cases = {
        "causal, group of 2, tail": (50, 50, 2, 4, 2, 64, 64, torch.float16, Mask(None, 0)),
        "full, one head a group": (33, 33, 1, 2, 2, 64, 64, torch.float16, Mask()),
        "window, one group, d 96": (70, 70, 1, 3, 1, 96, 96, torch.float16, Mask(9, 0)),
        "window to both sides": (40, 40, 1, 2, 1, 64, 64, torch.float16, Mask(5, 7)),
        "d 192, values 128": (37, 37, 1, 2, 1, 192, 128, torch.float16, Mask(None, 0)),
    }
    found = {}
    for name, (s_q, s_k, batch, heads, groups, d, d_v, dtype, mask) in cases.items():
        x = operands(s_q, s_k, batch, heads, groups, d, d_v, dtype)
        rows, keys = torch.arange(s_q), torch.arange(s_k)
        got = by_kernel(x, runs_of(rows, 0, 0, s_k), runs_of(keys, 0, 0, s_q), mask)
        want = by_reference(x, rows, keys, mask)
        found[name] = {result: far(got[result], want[result]) for result in NAMES}
    # Rows before key 0 have no keys, whatever hidden values hold.
    x = operands(8, 20, 1, 2, 1, 64, 64, torch.float16)
    rows = torch.arange(-3, 5)
    out, lse = kernel.attention_forward(
        x[0], x[1], x[2], runs_of(rows, 0, 0, 20), mask=Mask(None, 0), entries=SMALL
    )
    want_out, want_lse = reference.attention_forward(x[0], x[1], x[2], rows, mask=Mask(None, 0))
    found["rows before the sequence"] = {"out": far(out, want_out), "lse": far(lse, want_lse)}
    found["rows before the sequence"]["not zero"] = float(out[:3].count_nonzero())
    return found


def within() -> dict[str, list[int]]:
    """What must not change a bit -> [mismatches, elements]."""
    found: dict[str, list[int]] = {}

    def compare(name: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        counts = [count_mismatches(got, want)[:2] for got, want in pairs]
        found[name] = [sum(c[0] for c in counts), sum(c[1] for c in counts)]

    s, mask = 96, Mask(None, 0)
    x = operands(s, s, 2, 4, 2, 64, 64, torch.float16)
    all_rows = (Run(0, s, 0, 0, s),)
    whole = by_kernel(x, all_rows, all_rows, mask)
    for layout, cuts in {"zigzag": [(0, 24), (72, 96)], "contiguous": [(24, 72)]}.items():
        rows = torch.cat([torch.arange(*cut) for cut in cuts])
        runs = runs_of(rows, 0, 0, s)
        q, k, v, grad = x
        out, lse = kernel.attention_forward(q[rows], k, v, runs, mask=mask, entries=SMALL)
        statistics = kernel.attention_statistics(grad[rows], out, lse)
        dq = kernel.attention_dq(q[rows], k, v, grad[rows], *statistics, runs, mask=mask, entries=SMALL)
        statistics = kernel.attention_statistics(grad, whole["out"], whole["lse"])
        dk, dv = kernel.attention_dkv(q, k[rows], v[rows], grad, *statistics, runs, mask=mask, entries=SMALL)
        got = dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))
        compare(
            f"rows of a {layout} rank",
            [(got[n], whole[n][..., rows] if n == "lse" else whole[n][rows]) for n in NAMES],
        )
    heads_of = {
        "out": slice(2, 4),
        "lse": slice(2, 4),
        "dq": slice(2, 4),
        "dk": slice(1, 2),
        "dv": slice(1, 2),
    }
    alone = [t[:, 1:2, heads_of[n]].contiguous() for t, n in zip(x, ("dq", "dk", "dv", "out"), strict=True)]
    one = by_kernel(alone, all_rows, all_rows, mask)
    compare(
        "one group of one sequence alone",
        [(one[n], whole[n][1:2, h] if n == "lse" else whole[n][:, 1:2, h]) for n, h in heads_of.items()],
    )
    wide = replace(SMALL, forward=replace(SMALL.forward, rows=64), dq=replace(SMALL.dq, rows=16))
    other = by_kernel(x, all_rows, all_rows, mask, wide)
    compare("other tiles of rows", [(other[n], whole[n]) for n in NAMES])
    last = kernel.attention_forward(
        x[0][-1:], x[1], x[2], (Run(0, 1, s - 1, 0, s),), mask=mask, entries=SMALL
    )
    compare("decode", [(last[0], whole["out"][-1:]), (last[1], whole["lse"][..., -1:])])
    for name, y in (("delta", x), ("delta, 96", operands(40, 40, 1, 2, 2, 96, 96, torch.float16))):
        delta = kernel.attention_statistics(y[3], y[0], torch.zeros(y[0].shape[1:3] + y[0].shape[:1]))[1]
        compare(name, [(delta, reference.attention_delta(y[3], y[0]))])
    found.update(packed())
    found["pages"] = paged()
    wrong = replace(SMALL, **dict.fromkeys(("forward", "decode"), Launch(64, 64, 1, 1)))
    broken = by_kernel(x, all_rows, all_rows, mask, wrong)
    compare("mutant: other tiles of keys", [(broken["lse"], whole["lse"])])
    return found


def packed() -> dict[str, list[int]]:
    """Three sequences on one axis with NaN between them, one of length 0, against each alone."""
    lengths, starts, total = (37, 0, 50), (0, 48, 48), 112
    q, k, v, grad = operands(total, total, 1, 2, 1, 64, 64, torch.float16)
    real = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    pad = torch.ones(total, dtype=torch.bool)
    pad[real] = False
    for x in (q, k, v, grad):
        x[pad] = torch.nan
    mask = Mask(None, 0)
    runs = tuple(Run(a, n, 0, a, n) for a, n in zip(starts, lengths, strict=True))
    got = by_kernel([q, k, v, grad], runs, runs, mask)
    counts = [0, 0]
    for start, n in zip(starts, lengths, strict=True):
        if not n:
            continue
        rows = slice(start, start + n)
        alone = by_kernel(
            [t[rows] for t in (q, k, v, grad)], (Run(0, n, 0, 0, n),), (Run(0, n, 0, 0, n),), mask
        )
        for name in NAMES:
            part = got[name][..., rows] if name == "lse" else got[name][rows]
            mismatched, elements, _ = count_mismatches(part, alone[name])
            counts = [counts[0] + mismatched, counts[1] + elements]
    nonzero = sum(int(got[name][pad].count_nonzero()) for name in NAMES if name != "lse")
    nonzero += int((got["lse"][..., pad] != -torch.inf).sum())
    return {"packed": counts, "padding": [nonzero, int(pad.sum())]}


def paged() -> list[int]:
    """Two sequences over shuffled pages of 24 keys, NaN where nothing was written, against one tensor of keys."""
    generator = torch.Generator().manual_seed(5)
    lengths, s_q, page = (70, 33), 2, 24
    cache = torch.full((2, 8, page, 1, 64), torch.nan, dtype=torch.float16)
    places = torch.randperm(8, generator=generator)
    table = torch.full((2, 3), -1)
    mask, counts = Mask(None, 0), [0, 0]
    query = torch.randn(2, s_q, 2, 64, generator=generator).to(torch.float16)
    dense = []
    for n, length in enumerate(lengths):
        keys = torch.randn(2, length, 1, 64, generator=generator).to(torch.float16)
        for index in range(-(-length // page)):
            table[n, index] = places[3 * n + index]
            part = keys[:, index * page : (index + 1) * page]
            cache[:, table[n, index], : part.shape[1]] = part
        dense.append(keys)
    out, lse = kernel.paged_forward(
        query, cache[0], cache[1], table, torch.tensor(lengths), mask=mask, entries=SMALL
    )
    for n, length in enumerate(lengths):
        run = (Run(0, s_q, length - s_q, 0, length),)
        q, k, v = (x.unsqueeze(1) for x in (query[n], *dense[n]))
        want, want_lse = kernel.attention_forward(q, k, v, run, mask=mask, entries=SMALL)
        for got, wanted in ((out[n], want[:, 0]), (lse[n], want_lse[0])):
            mismatched, elements, _ = count_mismatches(got, wanted)
            counts = [counts[0] + mismatched, counts[1] + elements]
    return counts


if __name__ == "__main__":
    print(json.dumps({"reference": against_reference(), "bits": within()}))
