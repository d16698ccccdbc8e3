"""The LSE merge and output corrections against float64 and against the contract's corner cases."""

import itertools
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.lse_merge import reference as merge

INF, NAN = math.inf, math.nan


def _merged(first: float, second: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    lse = torch.tensor([first], dtype=dtype)
    merge.merge_lse_(lse, torch.tensor([second]))
    return lse


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        (-INF, -INF, -INF),
        (-INF, 1.0, 1.0),
        (1.0, -INF, 1.0),
        (INF, 1.0, 1.0),
        (1.0, INF, 1.0),
        (INF, INF, -INF),
        (INF, -INF, -INF),
        (-49993.98, 1.0, 1.0),
        (-49993.98, -49993.98, -49993.98 + math.log(2)),
        (NAN, 1.0, NAN),
        (1.0, NAN, NAN),
        (NAN, -INF, NAN),
        (-INF, NAN, NAN),
        (INF, NAN, NAN),
        (0.0, 0.0, math.log(2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_keys_sentinels_and_nan(
    first: float, second: float, want: float, dtype: torch.dtype
) -> None:
    """flashinfer#4401, flash-attention#978, flashinfer#4452: masked rows gave NaN or +inf."""
    got = _merged(first, second, dtype)
    if math.isfinite(want):
        assert float(got) == pytest.approx(want, rel=2e-7)
    else:
        assert_equal_bits(got, torch.tensor([want], dtype=dtype), f"merge({first}, {second})")


@pytest.mark.parametrize("first", [1e4, -1e4, 89.0, 800.0, -800.0])
def test_large_values_do_not_overflow_and_the_update_is_in_place(first: float) -> None:
    """NVIDIA/TransformerEngine#716: exp overflowed to NaN; the result did not reach the caller's tensor."""
    for second in (1e4, -1e4, 89.0, 800.0, -800.0):
        lse, step = torch.full((2, 3, 4), first), torch.full((2, 3, 4), second)
        address = lse.data_ptr()
        merge.merge_lse_(lse, step)
        assert lse.data_ptr() == address
        assert torch.isfinite(lse).all()
        want = torch.logaddexp(torch.tensor(first).double(), torch.tensor(second).double()).float()
        assert_equal_bits(lse, want.expand(2, 3, 4), f"merge({first}, {second})")


@settings(max_examples=200, deadline=None)
@given(
    first=st.floats(-1e5, 1e5, width=32),
    second=st.one_of(st.floats(-1e5, 1e5, width=32), st.floats(-20, 20, width=32)),
)
def test_merge_is_correctly_rounded_but_for_cancellation(first: float, second: float) -> None:
    got = float(_merged(first, second))
    with mpmath.workprec(200):
        high, low = max(first, second), min(first, second)
        exact = mpmath.mpf(high) + mpmath.log1p(mpmath.exp(mpmath.mpf(low) - mpmath.mpf(high)))
    exponent = max(int(mpmath.frexp(abs(exact))[1]) - 24, -149) if exact != 0 else -149
    # half a ULP, and the float64 rounding of a sum that may cancel down to nothing
    bound = mpmath.mpf(2) ** exponent * mpmath.mpf("0.501") + mpmath.mpf(2) ** -51 * max(1, abs(high))
    assert abs(mpmath.mpf(got) - exact) <= bound
    assert got >= high or exact < high + abs(high) * 2**-24


@settings(max_examples=100, deadline=None)
@given(first=st.floats(width=32), second=st.floats(width=32))
def test_merge_is_symmetric_to_the_bit(first: float, second: float) -> None:
    assert_equal_bits(_merged(first, second), _merged(second, first), f"merge({first}, {second})")


def test_bits_do_not_depend_on_layout_stride_or_packing() -> None:
    """NVIDIA/TransformerEngine#1235, #1467: packed [h, t] was refused."""
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(36, 13056, generator=generator) * 3 for _ in range(2))
    packed = lse.clone()
    merge.merge_lse_(packed, step)
    dense = lse.clone().view(1, 36, 13056)
    merge.merge_lse_(dense, step.view(1, 36, 13056))
    assert_equal_bits(dense[0], packed, "[b, h, s] against packed [h, t]")
    strided = torch.empty(13056, 36).t().copy_(lse)
    merge.merge_lse_(strided, step)
    assert_equal_bits(strided, packed, "transposed storage")
    halves = lse.clone()
    merge.merge_second_half_lse_(halves.view(36, 2, -1), step[:, 6528:])
    assert_equal_bits(halves[:, :6528], lse[:, :6528], "first half untouched")
    assert_equal_bits(halves[:, 6528:], packed[:, 6528:], "second half")


def test_a_float64_accumulator_stays_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    lse, step = torch.randn(64, generator=generator).double(), torch.randn(64, generator=generator)
    want = torch.logaddexp(lse, step.double())
    merge.merge_lse_(lse, step)
    assert lse.dtype == torch.float64
    assert float((lse - want).abs().max()) < 2**-50


def test_equal_bits_after_other_shapes() -> None:
    """ROCm/TransformerEngine#693: bits changed once another shape had been seen."""
    generator = torch.Generator().manual_seed(2)
    first = [torch.randn(2, 8, 4096, generator=generator) * 3 for _ in range(2)]
    other = [torch.randn(2, 8, 2048, generator=generator) * 3 for _ in range(2)]
    results = []
    for lse, step in (first, other, first):
        lse = lse.clone()
        merge.merge_lse_(lse, step)
        results.append(lse)
    assert_equal_bits(results[2], results[0], "the first shape again")


def _steps(dtype: torch.dtype, seq_dim: int, count: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    lses = [torch.randn(2, 4, 6, generator=generator) * 3 for _ in range(count)]  # [b, h, s]
    lses[1][0, 0, :3] = -INF
    shape = (2, 6, 4, 8) if seq_dim == 1 else (6, 2, 4, 8)
    outs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
    outs[1].movedim(seq_dim, 0)[:3, 0, 0] = NAN
    return outs, lses


def _exact_output(outs: list[torch.Tensor], lses: list[torch.Tensor], seq_dim: int) -> torch.Tensor:
    total = torch.logsumexp(torch.stack([lse.double() for lse in lses]), 0)
    weights = [torch.exp(lse.double() - total).movedim(2, seq_dim).unsqueeze(-1) for lse in lses]
    return sum(out.double().nan_to_num(0) * weight for out, weight in zip(outs, weights, strict=True))


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_of_the_output_correction_gives_the_whole_softmax(
    seq_dim: int, dtype: torch.dtype
) -> None:
    outs, lses = _steps(dtype, seq_dim)
    exact = _exact_output(outs, lses, seq_dim)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2

    total = lses[0].clone()
    for lse in lses[1:]:
        merge.merge_lse_(total, lse)
    late = merge.out_correction_init(outs[0], total, lses[0], seq_dim)
    assert late.dtype == dtype
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        merge.out_correction_(late, out, total, lse, seq_dim)
    assert float((late.double() - exact).abs().max()) < tolerance

    running, out, fused_lse, fused_out = lses[0].clone(), outs[0].clone(), lses[0].clone(), outs[0].clone()
    for step_out, lse in zip(outs[1:], lses[1:], strict=True):
        old = running.clone()
        merge.merge_lse_(running, lse)
        merge.incremental_out_correction_(out, step_out, old, running, lse, seq_dim)
        merge.merge_(fused_out, fused_lse, step_out, lse, seq_dim)
    assert float((out.double() - exact).abs().max()) < tolerance
    assert_equal_bits(fused_out, out, "one pass against merge, then correction")
    assert_equal_bits(fused_lse, running, "LSE of the one pass")


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_second_half_forms_equal_the_full_forms_on_that_half(seq_dim: int) -> None:
    outs, lses = _steps(torch.float32, seq_dim, 2)
    half_out, half_lse = outs[1].narrow(seq_dim, 3, 3), lses[1][..., 3:]
    old, new = lses[0], lses[0].clone()
    merge.merge_second_half_lse_(new.view(2, 4, 2, 3), half_lse)
    for second_half, full, lse_arguments in (
        (merge.second_half_out_correction_, merge.out_correction_, (new,)),
        (merge.incremental_second_half_out_correction_, merge.incremental_out_correction_, (old, new)),
    ):
        out, want = outs[0].clone(), outs[0].clone()
        second_half(out.unflatten(seq_dim, (2, 3)), half_out, *lse_arguments, half_lse, seq_dim)
        full(
            want.narrow(seq_dim, 3, 3), half_out, *(lse[..., 3:] for lse in lse_arguments), half_lse, seq_dim
        )
        assert_equal_bits(out, want, second_half.__name__)
        assert_equal_bits(out.narrow(seq_dim, 0, 3), outs[0].narrow(seq_dim, 0, 3), "first half untouched")


def test_two_rows_without_keys_give_zero_whatever_their_outputs_hold() -> None:
    for first, second in itertools.product((-INF, INF), repeat=2):
        out, lse = torch.full((1, 1, 1, 2), NAN), torch.full((1, 1, 1), first)
        merge.merge_(out, lse, torch.full((1, 1, 1, 2), INF), torch.full((1, 1, 1), second), 1)
        assert_equal_bits(out, torch.zeros(1, 1, 1, 2), "out")
        assert_equal_bits(lse, torch.full((1, 1, 1), -INF), "lse")


def test_one_row_without_keys_leaves_the_other_alone() -> None:
    value = torch.tensor([[[[0.1, -3.0, 1e-40]]]])
    for empty in (-INF, INF):
        out, lse = value.clone(), torch.full((1, 1, 1), 1.25)
        merge.merge_(out, lse, torch.full_like(value, NAN), torch.full((1, 1, 1), empty), 1)
        assert_equal_bits(out, value, "the step had no keys")
        out, lse = torch.full_like(value, NAN), torch.full((1, 1, 1), empty)
        merge.merge_(out, lse, value, torch.full((1, 1, 1), 1.25), 1)
        assert_equal_bits(out, value, "the accumulator had no keys")
        assert_equal_bits(lse, torch.full((1, 1, 1), 1.25), "lse")


def test_shapes_and_dtypes_that_do_not_fit_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) and \(2, 3, 5\)"):
        merge.merge_lse_(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
    with pytest.raises(TypeError, match="bfloat16"):
        merge.merge_lse_(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2))
    with pytest.raises(ValueError, match="dimension 1"):
        lse = torch.zeros(2, 3, 4)
        merge.out_correction_init(torch.zeros(2, 5, 3, 8), lse, lse, 1)


def test_mutation_float32_arithmetic_or_an_fma_is_seen() -> None:
    generator = torch.Generator().manual_seed(4)
    lse, step = (torch.randn(1 << 14, generator=generator) * 3 for _ in range(2))
    want = merge.merged_lse(lse, step)
    high, low = torch.maximum(lse, step), torch.minimum(lse, step)
    mutant = high + torch.log1p(torch.exp(low - high))
    mismatched, total, first = count_mismatches(mutant, want)
    assert mismatched > 0 and first is not None, f"{mismatched} of {total}"
    out, out_step = torch.randn(1, 1 << 14, 1, 1), torch.randn(1, 1 << 14, 1, 1)
    corrected, shaped = out.clone(), [x.view(1, 1, -1) for x in (lse, want, step)]
    merge.incremental_out_correction_(corrected, out_step, *shaped, 1)
    scale_old, scale_new = (
        merge.correction_weight(x, shaped[1]).movedim(2, 1).unsqueeze(-1) for x in shaped[::2]
    )
    # an fma rounds once: exact product and sum in float64, then float32
    fused = ((out * scale_old).double() + out_step.double() * scale_new.double()).float()
    assert count_mismatches(fused, corrected)[0] > 0
