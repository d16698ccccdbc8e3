"""Largest error of the portable functions over all 2^32 float32 inputs, on this GPU.

    python scripts/gpu/portable_math_exhaustive.py [FUNCTION …] [--json [FILE]]

Compared with the float64 function of the GPU's own library: its error, a few units of float64's last place, is 2^-28 of
a float32 unit, so the figure is good to eight digits. Contract: below 0.51 ULP. Inputs whose exact result is NaN,
infinite or beyond float32 are counted apart: ours must be the correctly rounded special value. Exit status 1 when the
contract is broken, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_plugins.verify.outputs import add_json, write_json
from te_overrides.kernels.portable_math import reference as math

TRIG_LIMIT = 2.0**20
BOUND = 0.51
CHUNK = 1 << 25
LIBRARY = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log1p": torch.log1p,
    "sigmoid": torch.sigmoid,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "cos": torch.cos,
    "sin": torch.sin,
}


def ulp(exact: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring float32 numbers around float64 `exact`; 2^-149 below the normal range."""
    exponent = torch.frexp(exact).exponent - 24
    return torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-149))


def measure(name: str) -> dict[str, float | int | str]:
    """Largest error in ULP and where, and the number of special values that are wrong."""
    worst, where, special = 0.0, 0.0, 0
    for start in range(-(2**31), 2**31, CHUNK):
        x = (
            torch.arange(start, start + CHUNK, device="cuda", dtype=torch.int64)
            .to(torch.int32)
            .view(torch.float32)
        )
        if name in ("cos", "sin"):
            x = x[x.abs() <= TRIG_LIMIT]
        got, exact = getattr(math, name)(x), LIBRARY[name](x.double())
        rounded = exact.to(torch.float32)
        odd = ~torch.isfinite(rounded) | ~torch.isfinite(got)
        same = (got == rounded) | (got.isnan() & rounded.isnan())
        special += int((odd & ~same).sum())
        error = torch.where(odd, 0.0, (got.double() - exact).abs() / ulp(torch.where(odd, 1.0, exact)))
        if error.numel() and float(error.max()) > worst:
            worst, where = float(error.max()), float(x[error.argmax()])
    return {"function": name, "max_ulp": worst, "at": where, "wrong_special_values": special}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("functions", nargs="*", default=list(LIBRARY), metavar="FUNCTION")
    add_json(parser)
    args = parser.parse_args()
    if unknown := set(args.functions) - set(LIBRARY):
        parser.error(f"unknown function {sorted(unknown)}; known: {sorted(LIBRARY)}")
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    rows = []
    for name in args.functions:
        start = time.monotonic()
        rows.append(measure(name))
        print(f"{rows[-1]}  ({time.monotonic() - start:.1f} s)", file=sys.stderr, flush=True)
    write_json(args.json, {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
    raise SystemExit(any(row["max_ulp"] >= BOUND or row["wrong_special_values"] for row in rows))


if __name__ == "__main__":
    main()
