"""Free launch parameters of the portable attention kernels on this GPU: bits first, then time against cuDNN.

    python scripts/gpu/attention_variants.py [--json [FILE]] [--head-dims 128 …] [--lengths 2048 4096]

Keys of a forward tile stay what they are, since they decide bits; rows, warps, stages and, in backward, the other
side's tile vary, with and without the mask of a sequence's last tile. Every candidate must have the bits of the table's
entry or it is not timed. Candidates are compiled in processes of their own, side by side; one that does not compile is
reported. Exit status 1 when one has other bits, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attention_bits import CAUSAL, operands, whole
from attention_checks import GROUPS, HEADS, candidates, race

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.architecture import architecture
from te_overrides.kernels.attention import kernel
from te_overrides.kernels.attention.launch_table import Launch, entries_for

# pass -> (rows, columns, warps, stages); forward: columns 0 stands for the class's own.
GRID = {
    "forward": [
        (128, 0, 8, 2), (128, 0, 4, 2), (128, 0, 8, 3), (128, 0, 8, 1), (64, 0, 4, 2), (64, 0, 4, 3), (64, 0, 4, 1),
    ],
    "dq": [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 1), (128, 128, 8, 1), (128, 128, 8, 2), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3), (128, 64, 4, 2),
    ],
    "dkv": [
        (128, 32, 8, 2), (128, 32, 8, 3), (128, 32, 8, 1), (128, 64, 8, 1), (128, 64, 8, 2), (64, 64, 4, 2),
        (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3), (64, 128, 4, 1), (128, 64, 4, 1), (64, 64, 8, 2),
    ],
}  # fmt: skip
WALL = 150
"""Seconds after which a candidate that still compiles is given up."""


def launches(which: str, d: int, arch: str) -> list[Launch]:
    """Candidates of one pass, the table's entry first."""
    entry = getattr(entries_for(arch, d), which)
    found = [entry]
    for rows, columns, warps, stages in GRID[which]:
        other = replace(
            entry, rows=rows, columns=columns or entry.columns, num_warps=warps, num_stages=stages
        )
        if other not in found:
            found.append(other)
    return found


class Case:
    """Operands of one head dimension and length, and each pass under any launch."""

    def __init__(self, s: int, d: int) -> None:
        self.x = operands(s, 1, HEADS, GROUPS, d, torch.bfloat16)
        self.runs = whole(s)
        self.entries = entries_for(architecture(self.x[0].device), d)
        out, lse = kernel.attention_forward(*self.x[:3], self.runs, mask=CAUSAL, entries=self.entries)
        self.rows = kernel.attention_statistics(self.x[3], out, lse)

    def run(self, which: str, launch: Launch, tail: bool) -> tuple[torch.Tensor, ...]:
        """Results of one pass; `tail` keeps the mask of a last tile that is not needed here."""
        q, k, v, grad = self.x
        entries = replace(self.entries, **{which: launch})
        kernel._has_tail = (lambda *_: True) if tail else _HAS_TAIL
        options: dict[str, Any] = {"mask": CAUSAL, "entries": entries}
        if which == "forward":
            return kernel.attention_forward(q, k, v, self.runs, **options)
        if which == "dq":
            return (kernel.attention_dq(q, k, v, grad, *self.rows, self.runs, **options),)
        return kernel.attention_dkv(q, k, v, grad, *self.rows, self.runs, **options)


_HAS_TAIL = kernel._has_tail


def compile_one(which: str, d: int, index: int, tail: bool) -> str | None:
    """Why a candidate does not run, or None; in a process of its own, so that it leaves its code in Triton's cache."""
    command = [sys.executable, __file__, "--one", which, str(d), str(index), str(int(tail))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=WALL, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return f"not compiled after {WALL} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1][:300]


def one(which: str, d: int, index: int, tail: bool) -> None:
    """Compile and run a candidate once."""
    case = Case(512, d)
    case.run(which, launches(which, d, architecture(case.x[0].device))[index], tail)
    torch.cuda.synchronize()


def sweep(head_dims: list[int], lengths: list[int], arch: str) -> list[dict[str, Any]]:
    """One row a candidate and length."""
    cells = [
        (which, d, index, tail)
        for d in head_dims
        for which in GRID
        for index in range(len(launches(which, d, arch)))
        for tail in (True, False)
    ]
    with ThreadPoolExecutor(16) as pool:
        broken = list(pool.map(lambda cell: compile_one(*cell), cells))
    rows: list[dict[str, Any]] = []
    for (which, d, index, tail), why in zip(cells, broken, strict=True):
        if why is not None:
            rows.append({"pass": which, "d": d, "launch": index, "tail": tail, "failed": why})
            print(rows[-1], flush=True)
    for d in head_dims:
        for s in lengths:
            case = Case(s, d)
            peers = candidates(s, d, portable=False)
            for which in GRID:
                found = launches(which, d, arch)
                want = case.run(which, found[0], True)
                functions, wrong = {}, {}
                for (w, dim, index, tail), why in zip(cells, broken, strict=True):
                    if (w, dim) != (which, d) or why is not None:
                        continue
                    got = case.run(which, found[index], tail)
                    differ = sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))
                    if differ:
                        wrong[index, tail] = differ
                    else:
                        functions[f"{index} {int(tail)}"] = (
                            lambda c=case, w=which, launch=found[index], t=tail: c.run(w, launch, t)
                        )
                functions |= {"cudnn": peers[0 if which == "forward" else 1]["cudnn"]}
                ms = race(functions, 11)
                for name, value in ms.items():
                    if name == "cudnn":
                        continue
                    index, tail = (int(word) for word in name.split())
                    rows.append(
                        {
                            "pass": which,
                            "d": d,
                            "S": s,
                            "tail": bool(tail),
                            **asdict(found[index]),
                            "ms": value,
                        }
                        | {"cudnn_pass_ms": ms["cudnn"]}
                    )
                best = sorted(
                    (row for row in rows if (row["pass"], row["d"], row.get("S")) == (which, d, s)),
                    key=lambda r: r["ms"],
                )
                print(f"d {d}, S {s}, {which}: cuDNN's pass {ms['cudnn']:.4f} ms")
                for row in best[:5] + [
                    r
                    for r in best
                    if r["tail"]
                    and (r["rows"], r["columns"], r["num_warps"], r["num_stages"])
                    == (found[0].rows, found[0].columns, found[0].num_warps, found[0].num_stages)
                ]:
                    print(
                        "   ",
                        {k: row[k] for k in ("rows", "columns", "num_warps", "num_stages", "tail", "ms")},
                        flush=True,
                    )
                for (index, tail), differ in wrong.items():
                    rows.append(
                        {
                            "pass": which,
                            "d": d,
                            "S": s,
                            "tail": tail,
                            **asdict(found[index]),
                            "differ": differ,
                        }
                    )
                    print("    OTHER BITS", rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
    parser.add_argument(
        "--one", nargs=4, help="pass, head dimension, candidate, tail: compile and run it once"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    if args.one:
        which, d, index, tail = args.one
        one(which, int(d), int(index), bool(int(tail)))
        return
    arch = architecture(torch.device("cuda", 0))
    with json_alone(args.json):
        rows = sweep(args.head_dims, args.lengths, arch)
    write_json(args.json, rows)
    raise SystemExit(any("differ" in row for row in rows))


if __name__ == "__main__":
    main()
