"""Rounding to bf16 and fp16: nearest even, NaN kept, no drift. The faulty modes live here alone."""

import math

import pytest
import torch

from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.rounding.reference import to_bfloat16, to_float16


def _every_stratum() -> torch.Tensor:
    """All signs and exponents, with low halves at, just below and just above the halfway points of both formats."""
    high = torch.arange(0, 1 << 16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high | low).flatten()
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def truncate_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """What ROCm/aiter#5151 reports: the low half is dropped."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def test_bfloat16_equals_ieee_rounding_on_every_upper_half() -> None:
    x = _every_stratum()
    assert_equal_bits(to_bfloat16(x), x.to(torch.bfloat16), "float32 to bfloat16")


def test_float16_equals_ieee_rounding_on_every_upper_half() -> None:
    x = _every_stratum()
    assert_equal_bits(to_float16(x), x.to(torch.float16), "float32 to float16")


@pytest.mark.parametrize("rounding", [to_bfloat16, to_float16])
def test_nan_with_an_empty_upper_payload_stays_nan(rounding) -> None:  # noqa: ANN001
    """ROCm/aiter#5151: 0x7f800001 became inf."""
    x = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounding(x).isnan().all()
    assert truncate_to_bfloat16(x)[:2].isinf().all()


@pytest.mark.parametrize(
    ("x", "bfloat16", "float16"),
    [
        (1 + 2**-8, 1.0, 1 + 2**-8),
        (1 + 3 * 2**-8, 1 + 2**-6, 1 + 3 * 2**-8),
        (65519.996, 65536.0, 65504.0),
        (65520.0, 65536.0, math.inf),
        (-65520.0, -65536.0, -math.inf),
        (2.0**-25, 2.0**-25, 0.0),
        (2.0**-25 * 1.0000001, 2.0**-25, 2.0**-24),
        (3.4028235e38, math.inf, math.inf),
        (-0.0, -0.0, -0.0),
    ],
)
def test_ties_go_to_even_and_overflow_to_inf(x: float, bfloat16: float, float16: float) -> None:
    tensor = torch.tensor([x])
    assert_equal_bits(to_bfloat16(tensor), torch.tensor([bfloat16], dtype=torch.bfloat16), f"bfloat16 of {x}")
    assert_equal_bits(to_float16(tensor), torch.tensor([float16], dtype=torch.float16), f"float16 of {x}")


def _residual_adds(rounding, adds: int = 72) -> float:  # noqa: ANN001
    """Mean signed relative error of |hidden| after `adds` rounded residual adds, against float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1 << 14, generator=generator).to(torch.bfloat16)
    exact = hidden.double()
    for _ in range(adds):
        delta = (torch.randn(1 << 14, generator=generator) * 0.3).to(torch.bfloat16)
        hidden = rounding(hidden.float() + delta.float())
        exact = exact + delta.double()
    return float(((hidden.double() - exact) * exact.sign()).sum() / exact.abs().sum())


def test_72_residual_adds_do_not_drift() -> None:
    """ROCm/aiter#5151: truncation shrinks the hidden state, a one-sided error that no ULP tolerance sees."""
    ours, truncated = _residual_adds(to_bfloat16), _residual_adds(truncate_to_bfloat16)
    assert abs(ours) < 1e-3, f"signed error {ours:+.2e}"
    assert truncated < -2e-2, f"truncation ought to shrink, got {truncated:+.2e}"
    mismatched, total, _ = count_mismatches(
        to_bfloat16(torch.linspace(1, 2, 10001)), truncate_to_bfloat16(torch.linspace(1, 2, 10001))
    )
    assert mismatched > 0.4 * total


def test_strides_and_shapes_are_kept_and_other_dtypes_refused() -> None:
    x = torch.randn(5, 6).t()
    assert_equal_bits(to_bfloat16(x), x.to(torch.bfloat16), "transposed")
    assert to_float16(torch.tensor(1.5)).shape == ()
    with pytest.raises(TypeError, match="float64"):
        to_bfloat16(torch.ones(1, dtype=torch.float64))
