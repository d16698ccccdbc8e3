"""The audit's arithmetic against exact rational numbers and against numpy."""

from fractions import Fraction

import numpy as np
import pytest

from te_overrides.audit.isa import SEMANTICS
from te_overrides.audit.numeric import fma_f32, fma_f64, round_fraction


def random_bits(dtype, count, seed):
    unsigned = {np.float32: np.uint32, np.float64: np.uint64}[dtype]
    drawn = np.random.default_rng(seed).integers(0, np.iinfo(unsigned).max, count, unsigned, endpoint=True)
    return drawn.view(dtype)


def near_cancellation(dtype, count, seed):
    """Addends close to minus the product, where two roundings show."""
    generator = np.random.default_rng(seed)
    a = generator.uniform(0.5, 2, count).astype(dtype)
    b = generator.uniform(0.5, 2, count).astype(dtype)
    return a, b, -(a * b) * (1 + generator.integers(-2, 3, count).astype(dtype) * np.finfo(dtype).eps)


def nearest_f32(value):
    """The float32 nearest to a fraction, ties to even, by integers alone."""
    if value == 0:
        return np.float32(0)
    size, exponent = abs(value), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps, rest = divmod(abs(value), unit)
    steps += rest * 2 > unit or (rest * 2 == unit and steps % 2)
    magnitude = steps * unit
    if magnitude >= Fraction(2) ** 128:
        return np.float32(np.copysign(np.inf, 1 if value > 0 else -1))
    return np.float32(np.copysign(float(magnitude), 1 if value > 0 else -1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_rounds_once(dtype):
    count = 1500
    random = [random_bits(dtype, count, seed) for seed in range(3)]
    narrow = [np.random.default_rng(seed).normal(size=count).astype(dtype) for seed in range(3)]
    far = [narrow[0], narrow[1], (narrow[2] * dtype(2.0**40)).astype(dtype)]
    fma = fma_f32 if dtype is np.float32 else fma_f64
    nearest = nearest_f32 if dtype is np.float32 else round_fraction
    checked = 0
    for a, b, c in (random, narrow, far, near_cancellation(dtype, count, 5)):
        got = fma(a, b, c)
        finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        for index in np.flatnonzero(finite):
            exact = Fraction(float(a[index])) * Fraction(float(b[index])) + Fraction(float(c[index]))
            assert got[index] == nearest(exact), (a[index], b[index], c[index])
            checked += 1
    assert checked > 5000


def test_an_fma_with_two_roundings_is_told_apart():
    a, b, c = near_cancellation(np.float32, 2000, 7)
    assert (fma_f32(a, b, c) != a * b + c).sum() > 1000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_of_infinities_nan_and_signed_zeros(dtype):
    cases = [
        (np.inf, 0, 1), (np.inf, 1, -np.inf), (np.inf, 2, 3), (0, 5, -np.inf), (np.nan, 1, 1),
        (-0.0, 5, 0.0), (-0.0, 5, -0.0), (0.0, 5, -0.0), (1, 1, -1), (-1, 1, 1),
    ]  # fmt: skip
    a, b, c = (np.array(column, dtype) for column in zip(*cases, strict=True))
    fma = fma_f32 if dtype is np.float32 else fma_f64
    with np.errstate(all="ignore"):
        want = a * b + c
    got = fma(a, b, c)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize(
    ("name", "fn"),
    [("add", np.add), ("mul", np.multiply), ("floor", np.floor), ("rndne", np.rint), ("lt", np.less)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_instructions_with_ieee_meaning_agree_with_numpy(name, fn, dtype):
    semantic = SEMANTICS[f"{name}.f{np.dtype(dtype).itemsize * 8}"]
    arrays = [random_bits(dtype, 4000, seed) for seed in range(len(semantic.sources))]
    with np.errstate(all="ignore"):
        got, want = semantic.fn(*arrays), fn(*arrays)
    assert np.array_equal(got, want, equal_nan=True)


def test_minimum_and_maximum_know_nan_and_the_sign_of_zero():
    low, high = SEMANTICS["min.f32"].fn, SEMANTICS["max.f32"].fn
    a = np.array([0.0, -0.0, np.nan, 1], np.float32)
    b = np.array([-0.0, 0.0, 2, np.nan], np.float32)
    assert np.signbit(low(a, b)).tolist() == [True, True, False, False]
    assert np.signbit(high(a, b)).tolist() == [False, False, False, False]
    assert low(a, b)[2:].tolist() == [2, 1]


def test_bfloat16_conversion_rounds_to_nearest_even():
    values = random_bits(np.float32, 4000, 3)
    values = values[np.isfinite(values)]
    got = SEMANTICS["cvt.bf16.f32"].fn(values)
    for value, bits in zip(values[:500], got[:500], strict=True):
        below = int(value.view(np.uint32)) >> 16
        rest = int(value.view(np.uint32)) & 0xFFFF
        assert int(bits) == below + (rest > 0x8000 or (rest == 0x8000 and below & 1))
