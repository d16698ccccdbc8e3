"""float32 to bfloat16 and float16 by round to nearest even, in integer operations (C8).

A fused add+RMSNorm that truncates instead shifts every store the same way, and 72 residual adds later the hidden state
has shrunk by percents (ROCm/aiter#5151). Rounding is therefore written out here, one integer addition, rather than
left to a conversion whose mode depends on a build flag. NaN stays NaN (0x7f800001 must not become inf: adding the
rounding bias to it would carry into the exponent, or dropping the low half would leave infinity's bits), with the quiet
bit set and the upper payload kept. Finite values beyond the largest number round to inf, as IEEE 754 asks.

`Tensor.to` rounds the same way, to the bit on every upper half of float32 (tests/unit/test_rounding_reference.py), so
the other references convert with it and kernels are held to these functions.
"""

import torch


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """float32 tensor of any shape -> bfloat16, nearest even.

    Raises TypeError for another dtype.
    """
    bits = _bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return _as_16_bits(torch.where(torch.isnan(x), quiet_nan, rounded), torch.bfloat16)


def to_float16(x: torch.Tensor) -> torch.Tensor:
    """float32 tensor of any shape -> float16, nearest even, subnormals included.

    Raises TypeError for another dtype.
    """
    bits = _bits(x)
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    # Exponent bias 127 -> 15; the carry of the rounding addition may step into the next exponent, which is right.
    normal = (magnitude - (112 << 23) + 0x0FFF + ((magnitude >> 13) & 1)) >> 13
    # 0.5 has a last place of 2^-24, float16's smallest subnormal: this addition does the rounding.
    subnormal = (torch.abs(x) + 0.5).view(torch.int32).to(torch.int64) - 0x3F000000
    rounded = torch.where(magnitude < 0x38800000, subnormal, normal)
    # 65520 is halfway between the largest number, 65504, and 65536.
    rounded = torch.where(magnitude >= 0x477FF000, 0x7C00, rounded)
    quiet_nan = 0x7E00 | ((magnitude >> 13) & 0x03FF)
    return _as_16_bits(sign | torch.where(torch.isnan(x), quiet_nan, rounded), torch.float16)


def _bits(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"rounding: expected a torch.float32 tensor, got {x.dtype}")
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _as_16_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # To the signed range first: an integer conversion out of range is not defined everywhere.
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(dtype)
