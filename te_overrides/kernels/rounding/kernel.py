"""`reference.py`'s bfloat16 rounding as a Triton device function, for kernels that store 16-bit results.

Triton's own conversion is round to nearest even on sm_90, gfx942 and gfx950, and truncates in Triton's interpreter.
Written out in integers it is the same everywhere. float16 conversions agree everywhere already.
"""

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x):
    """float32 -> bfloat16, nearest even, NaN kept."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return tl.where(x == x, rounded, quiet_nan).to(tl.uint16).to(tl.bfloat16, bitcast=True)
