"""The loss's fused exponential against the portable one for every float32 from -0 to -104, on a CPU.

    python scripts/fused_exponential_exhaustive.py

`te_overrides/kernels/cross_entropy/narrow.py` evaluates the portable polynomial with fused multiply-adds. Both are made
of IEEE operations alone, so a C program of them has the bits that a GPU has. Needs a C compiler as `cc` and some
seconds. Below -104 both are 0. Exit status 1 when a float32 differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from te_overrides.kernels.portable_math import constants as c

SOURCE = """
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static const double E[] = {%(coefficients)s};
static const double MAGIC = %(magic)s, LOG2_E = %(log2_e)s, HIGH = %(high)s, LOW = %(low)s;
static double number(int64_t b) { double v; memcpy(&v, &b, 8); return v; }
static int64_t bits(double v) { int64_t b; memcpy(&b, &v, 8); return b; }
static double portable(double x) {
  double s = x * LOG2_E + MAGIC, k = s - MAGIC;
  int64_t n = bits(s) - %(magic_bits)dLL, first = n >> 1, second = n - first;
  double r = (x - k * HIGH) - k * LOW, v = r * E[8] + E[7];
  for (int i = 6; i >= 0; i--) v = v * r + E[i];
  v = v * r + 1.0;
  v = v * r + 1.0;
  return v * number((first + 1023) << 52) * number((second + 1023) << 52);
}
static double fused(double x) {
  double s = fma(x, LOG2_E, MAGIC), k = s - MAGIC;
  double r = fma(-k, LOW, fma(-k, HIGH, x)), v = fma(r, E[8], E[7]);
  for (int i = 6; i >= 0; i--) v = fma(v, r, E[i]);
  v = fma(v, r, 1.0);
  v = fma(v, r, 1.0);
  return number(bits(v) + (int64_t)((uint64_t)bits(s) << 52));
}
int main(void) {
  long wrong = 0, total = 0;
  double farthest = 0;
  for (uint32_t u = 0x80000000u; u <= 0xC2D00000u; u++, total++) {
    float x;
    memcpy(&x, &u, 4);
    double a = portable(x), b = fused(x), away = fabs(a - b) / a;
    float one = (float)a, other = x > -104.0f ? (float)b : 0.0f;
    wrong += memcmp(&one, &other, 4) != 0;
    if (away > farthest) farthest = away;
  }
  printf("%%ld of %%ld float32 arguments differ; float64 values by up to 2^%%.2f\\n", wrong, total, log2(farthest));
  return wrong != 0;
}
"""


def main() -> int:
    values = {
        "coefficients": ", ".join(value.hex() for value in c.EXP),
        "magic": c.ROUND_MAGIC.hex(), "magic_bits": c.ROUND_MAGIC_BITS, "log2_e": c.LOG2_E.hex(),
        "high": c.LN2_HIGH.hex(), "low": c.LN2_LOW.hex(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "check.c"), Path(folder, "check")
        source.write_text(SOURCE % values)
        subprocess.run(
            ["cc", "-O3", "-march=native", "-ffp-contract=off", source, "-o", program, "-lm"], check=True
        )
        return subprocess.run([program], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
