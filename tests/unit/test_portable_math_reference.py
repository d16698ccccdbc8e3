"""Portable math against mpmath: error below 0.51 ULP of float32, IEEE 754 special values, no other operations."""

import math
import struct

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_equal_bits
from te_overrides.kernels.portable_math import constants
from te_overrides.kernels.portable_math import reference as portable

FUNCTIONS = ("exp", "exp2", "log", "log1p", "sigmoid", "silu", "rsqrt", "cos", "sin")
LARGEST = mpmath.mpf(2) ** 128 - mpmath.mpf(2) ** 104
OVERFLOW = mpmath.mpf(2) ** 128 - mpmath.mpf(2) ** 103


def _exact(name: str, x: float) -> mpmath.mpf | None:
    """The value in 120 bits; None where the function has no finite real value."""
    with mpmath.workprec(120):
        y = mpmath.mpf(x)
        if name == "exp":
            return mpmath.exp(y)
        if name == "exp2":
            return mpmath.power(2, y)
        if name == "log":
            return mpmath.log(y) if x > 0 else None
        if name == "log1p":
            return mpmath.log1p(y) if x > -1 else None
        if name == "sigmoid":
            return 1 / (1 + mpmath.exp(-y))
        if name == "silu":
            return y / (1 + mpmath.exp(-y))
        if name == "rsqrt":
            return 1 / mpmath.sqrt(y) if x > 0 else None
        if abs(x) > constants.TRIG_LIMIT:
            return None
        return mpmath.cos(y) if name == "cos" else mpmath.sin(y)


def _ulps(got: float, exact: mpmath.mpf) -> float:
    """|got - exact| in units of float32's last place at `exact`; an overflow must be exactly where IEEE puts it."""
    if abs(exact) >= OVERFLOW:
        return 0.0 if got == math.copysign(math.inf, exact) else math.inf
    if not math.isfinite(got):
        return math.inf
    exponent = max(int(mpmath.frexp(abs(exact))[1]) - 24, -149) if exact != 0 else -149
    return float(abs(mpmath.mpf(got) - exact) / mpmath.mpf(2) ** exponent)


def _from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def _neighbours(x: float, steps: int) -> list[float]:
    centre = struct.unpack("<I", struct.pack("<f", x))[0]
    return [
        _from_bits(max(0, (centre & 0x7FFFFFFF) + step) | (centre & 0x80000000))
        for step in range(-steps, steps + 1)
    ]


def _stratified() -> list[float]:
    """Every exponent of both signs with four significands, and the neighbourhoods where something changes."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 1 << 23, (512, 2), generator=generator).tolist()
    values: list[float] = []
    for row, high in zip(random, range(512), strict=True):
        if high & 0xFF != 0xFF:
            values += [_from_bits((high << 23) | low) for low in (0, 0x7FFFFF, *row)]
    turning = (
        0.0,
        1.0,
        0.5,
        2.0,
        math.log(2.0) / 2,
        math.sqrt(0.5),
        math.sqrt(2.0),
        math.sqrt(2.0) - 1,
        1 - math.sqrt(0.5),
        88.72284,
        87.33655,
        103.97208,
        103.27893,
        128.0,
        126.0,
        149.0,
        150.0,
        math.pi / 4,
        math.pi / 2,
        math.pi,
        355.0,
        # the float32 numbers below 2^20 closest to a multiple of pi/2: the reduction cancels hardest
        252.89820861816406,
        4.71238899230957,
        52516.43359375,
        1048576.0,
    )
    for x in turning:
        values += _neighbours(x, 3) + _neighbours(-x, 3)
    return values


SAMPLE = _stratified()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_is_below_half_a_ulp_and_a_hundredth_on_every_exponent(name: str) -> None:
    got = getattr(portable, name)(torch.tensor(SAMPLE, dtype=torch.float32)).tolist()
    worst = 0.0
    for x, value in zip(SAMPLE, got, strict=True):
        exact = _exact(name, x)
        if exact is None:
            assert math.isnan(value) or math.isinf(value), f"{name}({x!r}) = {value!r} has no finite value"
            continue
        error = _ulps(value, exact)
        worst = max(worst, error)
        assert error < 0.51, f"{name}({x!r} = {x.hex()}) = {value!r} is off by {error:.4f} ULP"
    assert worst > 0.4, f"{name}: a worst error of {worst:.4f} ULP says that the sample tested nothing"


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=60, deadline=None)
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_error_holds_wherever_hypothesis_looks(name: str, x: float) -> None:
    got = float(getattr(portable, name)(torch.tensor(x, dtype=torch.float32)))
    exact = _exact(name, x)
    if exact is not None:
        assert _ulps(got, exact) < 0.51, f"{name}({x.hex()}) = {got!r}"


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        *((name, NAN, NAN) for name in FUNCTIONS),
        ("exp", INF, INF),
        ("exp", -INF, 0.0),
        ("exp", -0.0, 1.0),
        ("exp2", INF, INF),
        ("exp2", -INF, 0.0),
        ("log", INF, INF),
        ("log", 0.0, -INF),
        ("log", -0.0, -INF),
        ("log", -1e-45, NAN),
        ("log", -INF, NAN),
        ("log", 1.0, 0.0),
        ("log1p", INF, INF),
        ("log1p", -1.0, -INF),
        ("log1p", -1.0000001, NAN),
        ("log1p", -INF, NAN),
        ("log1p", 0.0, 0.0),
        ("log1p", -0.0, -0.0),
        ("log1p", -1e-45, -1e-45),
        ("sigmoid", INF, 1.0),
        ("sigmoid", -INF, 0.0),
        ("silu", INF, INF),
        ("silu", -INF, NAN),
        ("silu", -0.0, -0.0),
        ("silu", -3e38, -0.0),
        ("rsqrt", 0.0, INF),
        ("rsqrt", -0.0, -INF),
        ("rsqrt", INF, 0.0),
        ("rsqrt", -1.0, NAN),
        ("sin", -0.0, -0.0),
        ("sin", INF, NAN),
        ("cos", -INF, NAN),
        ("sin", 1048576.125, NAN),
        ("cos", -1048576.125, NAN),
        ("cos", -0.0, 1.0),
    ],
)
def test_special_values_are_those_of_ieee_754(name: str, x: float, want: float) -> None:
    got = getattr(portable, name)(torch.tensor([x], dtype=torch.float32))
    assert_equal_bits(got, torch.tensor([want], dtype=torch.float32), f"{name}({x})")


def test_exp2_is_exact_at_every_integer() -> None:
    k = torch.arange(-149, 128)
    want = torch.ldexp(torch.ones(len(k), dtype=torch.float64), k).to(torch.float32)
    assert_equal_bits(portable.exp2(k.to(torch.float32)), want, "exp2 of integers")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("exp", -745.0, 709.0),
        ("exp2", -1022.0, 1023.0),
        ("log", 1e-300, 1e300),
        ("log1p", -0.999, 1e300),
        ("log1p", -1e-8, 1e-8),
        ("sigmoid", -700.0, 700.0),
        ("rsqrt", 1e-300, 1e300),
    ],
)
def test_float64_cores_keep_48_bits(name: str, low: float, high: float) -> None:
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(300, generator=generator, dtype=torch.float64)
    # over many magnitudes where the range has them
    x = 10 ** (uniform * 600 - 300) if low == 1e-300 else low + uniform * (high - low)
    got = getattr(portable, f"{name}_f64")(x).tolist()
    for argument, value in zip(x.tolist(), got, strict=True):
        exact = _exact(name, argument)
        if exact is None or abs(exact) < mpmath.mpf(2) ** -1000:
            continue
        assert abs(mpmath.mpf(value) - exact) <= abs(exact) * mpmath.mpf(2) ** -48, (
            f"{name}({argument!r}) = {value!r}"
        )


def test_polynomials_fit_their_functions_to_51_bits() -> None:
    def worst(pairs: list[tuple[mpmath.mpf, mpmath.mpf]]) -> float:
        return float(max(abs(fit - exact) / abs(exact) for fit, exact in pairs))

    def polynomial(coefficients: tuple[float, ...], x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.polyval([mpmath.mpf(value) for value in reversed(coefficients)], x)

    steps = range(-200, 201)
    with mpmath.workprec(150):
        half_ln2, quarter_pi = mpmath.ln2 / 2, mpmath.pi / 4
        s_limit = (mpmath.sqrt(2) - 1) / (mpmath.sqrt(2) + 1)
        rs = [half_ln2 * i / 200 for i in steps]
        assert worst([(1 + r + r * r * polynomial(constants.EXP, r), mpmath.exp(r)) for r in rs]) < 2**-51.5
        ss = [s_limit * i / 200 for i in steps if i]
        assert (
            worst(
                [(2 * s + s**3 * polynomial(constants.LOG, s * s), mpmath.log((1 + s) / (1 - s))) for s in ss]
            )
            < 2**-51.5
        )
        ts = [quarter_pi * i / 200 for i in steps if i]
        assert worst([(t + t**3 * polynomial(constants.SIN, t * t), mpmath.sin(t)) for t in ts]) < 2**-51.5
        assert (
            worst([(1 - t * t / 2 + t**4 * polynomial(constants.COS, t * t), mpmath.cos(t)) for t in ts])
            < 2**-51.5
        )


def test_splits_multiply_exactly_by_the_largest_integer() -> None:
    for part, limit in (
        (constants.LN2_HIGH, 1076),
        (constants.PI_2_HIGH, 2**20 - 1),
        (constants.PI_2_MIDDLE, 2**20 - 1),
    ):
        with mpmath.workprec(200):
            assert mpmath.mpf(part) * limit == mpmath.mpf(part * limit)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_dtype_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match="torch.bfloat16"):
        getattr(portable, name)(torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="torch.float32"):
        getattr(portable, f"{name}_f64")(torch.ones(1))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_length_stride_or_threads(name: str) -> None:
    x = torch.randn(4097, generator=torch.Generator().manual_seed(2)) * 8
    function = getattr(portable, name)
    whole = function(x)
    assert_equal_bits(torch.cat([function(piece) for piece in x.split(7)]), whole, f"{name} in pieces of 7")
    strided = torch.empty(4097, 3)[:, 1].copy_(x)
    assert_equal_bits(function(strided), whole, f"{name} strided")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_equal_bits(function(x), whole, f"{name} on one thread")
    finally:
        torch.set_num_threads(threads)


def test_only_correctly_rounded_operations_are_used() -> None:
    """Every aten operation that runs is an IEEE 754 basic one, a comparison, a select or moves bits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    allowed = {
        "add", "sub", "rsub", "mul", "div", "sqrt", "neg", "where", "gt", "lt", "ge", "le", "eq", "ne",
        "bitwise_and", "__and__", "__rshift__", "__lshift__", "bitwise_right_shift", "bitwise_left_shift",
        "_to_copy", "view", "detach", "ones_like", "scalar_tensor",
    }  # fmt: skip
    seen: set[str] = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN202
            seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.rand(8) + 0.5
    with Record():
        for name in FUNCTIONS:
            getattr(portable, name)(x)
    assert seen <= allowed, f"unexpected operations {sorted(seen - allowed)}"
