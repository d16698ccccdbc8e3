"""`reference.py`'s roundings as Triton device functions, for kernels that store 16-bit results.

Triton's own bfloat16 conversion is round to nearest even on sm_90, gfx942 and gfx950, and truncates in Triton's
interpreter. Written out in integers it is the same everywhere. Its float16 conversion agrees everywhere, but on AMD a
product is merged into it (v_fma_mixlo_f16), and no manual says that two roundings remain.
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


@triton.jit
def to_float16(x):
    """float32 -> float16, nearest even, NaN kept, subnormals included."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + 0x0FFF + ((magnitude >> 13) & 1)) >> 13
    # 0.5 has a last place of 2^-24, float16's smallest subnormal: this addition does the rounding.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.uint32, bitcast=True) - 0x3F000000
    rounded = tl.where(magnitude < 0x38800000, subnormal, normal)
    rounded = tl.where(magnitude >= 0x477FF000, 0x7C00, rounded)
    quiet_nan = 0x7E00 | ((magnitude >> 13) & 0x03FF)
    with_sign = ((bits >> 16) & 0x8000) | tl.where(x == x, rounded, quiet_nan)
    return with_sign.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 -> bfloat16, float16 or float32, nearest even, NaN kept."""
    if DTYPE == tl.bfloat16:
        return to_bfloat16(x)
    elif DTYPE == tl.float16:
        return to_float16(x)
    else:
        return x.to(DTYPE)


@triton.jit
def stored(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """`rounded` by the GPU's own conversion where that is one instruction of the same rounding (`rounds_natively`)."""
    if NATIVE:
        return x.to(DTYPE)
    else:
        return rounded(x, DTYPE)


@triton.jit
def converted(x, DTYPE: tl.constexpr, HIP: tl.constexpr):
    """A float32 product -> DTYPE by the GPU's own conversion, for inner loops, where the integers above cost too much.

    On AMD an instruction that is empty keeps the product out of a conversion to float16.
    """
    if HIP and DTYPE == tl.float16:
        x = tl.inline_asm_elementwise("", "=v,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x.to(DTYPE)
