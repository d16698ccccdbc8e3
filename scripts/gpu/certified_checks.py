"""Library products on this GPU: which shapes of the FFN are certified, whether they stay equal, what they gain.

    python scripts/gpu/certified_checks.py [--json [FILE]] [--seconds N] [--draws N]

Every certified product is compared with ours again on fresh numbers, N times. Times are medians of one run, ours and
the library's interleaved. Exit status 1 when a certified product differs later, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from timing import median_ms

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.gemm import ops
from te_overrides.kernels.gemm.certified import Certificates, Torch

HIDDEN, INTERMEDIATE = 4096, 12288


def products(rows: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Operands of the block's one-lane contractions."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    x, packed, h = randn(rows, HIDDEN), randn(rows, 2 * INTERMEDIATE), randn(rows, INTERMEDIATE)
    return {
        "gate and up": (x, randn(2 * INTERMEDIATE, HIDDEN)),
        "dH": (x, randn(HIDDEN, INTERMEDIATE).t()),
        "dW of gate and up": (packed.t(), x.t()),
        "dW of down": (x.t(), h.t()),
        "QKV": (x, randn(6144, HIDDEN)),
    }


def check(
    name: str, rows: int, a: torch.Tensor, b: torch.Tensor, found: Certificates, draws: int
) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"product": name, "rows": rows, "obstacle": found.obstacle(a, b, a.dtype)}
    if row["obstacle"] is not None:
        return row
    certificate = found.certificate(a, b)
    row["certificate"] = asdict(certificate)
    library = found.library
    if certificate.equal:
        row["later"] = [0, 0]
        for _ in range(draws):
            x, y = torch.randn_like(a), torch.randn_like(b)
            differ, total, _ = count_mismatches(library.multiply(x, y), ops.own_one_lane(x, y))
            row["later"] = [row["later"][0] + differ, row["later"][1] + total]
    ms = median_ms(
        {
            "library": lambda: library.multiply(a, b),
            "certified": lambda: found.product(a, b, a.dtype),
            "ours": lambda: ops.own_one_lane(a, b),
        },
        "cuda",
        9,
    )
    return row | {"ms": ms, "library_over_ours": ms["library"] / ms["ours"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    with json_alone(args.json):
        deadline, rows = time.monotonic() + args.seconds, []
        with tempfile.TemporaryDirectory() as folder:
            found = Certificates(Torch(), ops.own_one_lane, Path(folder))
            for m in (4096, 8, 32, 512, 2048, 8192, 1):
                for name, (a, b) in products(m).items():
                    if time.monotonic() > deadline:
                        rows.append({"product": name, "rows": m, "skipped": "the time was up"})
                        continue
                    try:
                        rows.append(check(name, m, a, b, found, args.draws))
                    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                        rows.append(
                            {"product": name, "rows": m, "error": f"{type(error).__name__}: {error}"[:300]}
                        )
                    row = rows[-1]
                    said = row.get("certificate", {})
                    print(
                        name, m, row.get("error") or row.get("obstacle") or said.get("refused") or "equal",
                        row.get("later"),
                        {k: round(v, 4) for k, v in row.get("ms", {}).items()},
                        [k[:60] for k in said.get("kernels", ())],
                        flush=True,
                    )  # fmt: skip
            again = (
                [
                    (key.shape, before.equal, now.equal)
                    for key, before, now in found.recheck(torch.device("cuda", 0))
                ]
                if time.monotonic() < deadline
                else []
            )
            print("tried again:", len(again), "changed:", [row for row in again if row[1] != row[2]])
    report = {
        "device": torch.cuda.get_device_name(),
        "library": Torch().version(),
        "rows": rows,
        "again": again,
    }
    write_json(args.json, report)
    raise SystemExit(any(row.get("later", [0])[0] for row in rows) or any(b and not n for _, b, n in again))


if __name__ == "__main__":
    main()
