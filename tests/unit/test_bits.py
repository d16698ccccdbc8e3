"""The comparison that every other bitwise claim rests on, shown able to fail."""

import pytest
import torch

from bits import assert_equal_bits, count_mismatches

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_tensors_have_no_mismatch(dtype):
    x = torch.linspace(-2, 2, 24).reshape(4, 6).to(dtype)
    assert count_mismatches(x, x.clone()) == (0, 24, None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_flipped_low_bit_is_seen_and_located(dtype):
    x = torch.linspace(1, 2, 24).reshape(4, 6).to(dtype)
    y = x.clone()
    y.view(torch.uint8).reshape(24, -1)[15, 0] ^= 1
    assert count_mismatches(y, x) == (1, 24, (2, 3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_negative_zero_differs_from_positive_zero(dtype):
    zero = torch.zeros(3).to(dtype)
    negative = (-torch.zeros(3)).to(dtype)
    assert count_mismatches(negative, zero) == (3, 3, (0,))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_equals_nan_and_nothing_else(dtype):
    x = torch.tensor([1.0, float("nan"), float("nan")]).to(dtype)
    y = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    assert count_mismatches(x, y) == (1, 3, (2,))


def test_nan_payload_and_sign_do_not_count():
    payloads = torch.tensor([0x7FC00000, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all()
    assert count_mismatches(payloads, torch.full((3,), float("nan"))) == (0, 3, None)


def test_infinity_is_not_nan():
    inf = torch.tensor([float("inf"), float("-inf")])
    assert count_mismatches(inf, inf.clone()) == (0, 2, None)
    assert count_mismatches(inf, torch.full((2,), float("nan"))) == (2, 2, (0,))


def test_strides_do_not_matter():
    x = torch.arange(12.0).reshape(3, 4)
    assert count_mismatches(x.t(), x.t().contiguous()) == (0, 12, None)
    assert count_mismatches(x.expand(2, 3, 4), torch.stack([x, x])) == (0, 24, None)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_integers_bools_and_complex_are_compared_too(dtype):
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    y = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert count_mismatches(x, y) == (1, 4, (2,))


def test_scalars_and_empty_tensors():
    assert count_mismatches(torch.tensor(1.0), torch.tensor(2.0)) == (1, 1, ())
    assert count_mismatches(torch.empty(0, 3), torch.empty(0, 3)) == (0, 0, None)


def test_a_tensor_that_requires_grad_is_compared():
    x = torch.ones(2, requires_grad=True)
    assert count_mismatches(x, torch.ones(2)) == (0, 2, None)


def test_shape_and_dtype_are_part_of_the_claim():
    with pytest.raises(ValueError, match=r"got shape \(2,\), want shape \(1, 2\)"):
        count_mismatches(torch.ones(2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"got dtype torch.bfloat16, want dtype torch.float32"):
        count_mismatches(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))
    with pytest.raises(AssertionError, match=r"out: shape \(2,\), want \(1, 2\)"):
        assert_equal_bits(torch.ones(2), torch.ones(1, 2), "out")
    with pytest.raises(AssertionError, match=r"out: dtype torch.float64, want torch.float32"):
        assert_equal_bits(torch.ones(2, dtype=torch.float64), torch.ones(2), "out")


def test_message_says_what_how_many_and_where():
    want = torch.zeros(8, 512)
    got = want.clone()
    got[0, 3] = 1.5
    got[7] = -0.0
    with pytest.raises(
        AssertionError, match=r"^dK: 513 of 4096 elements differ, first at \(0, 3\): got 1.5, want 0.0"
    ):
        assert_equal_bits(got, want, "dK")
