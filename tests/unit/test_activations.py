"""Activations beside SwiGLU: right values and slopes, one rounding a stage, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bits import assert_equal_bits
from megatron_plugins.modules.activation import activation_of
from patches.errors import NotCoveredError
from te_overrides.kernels.activations import reference
from te_overrides.kernels.swiglu import reference as swiglu

FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
}


def test_every_activation_has_a_formula_here() -> None:
    assert FORMULAS.keys() == reference.ACTIVATIONS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_slope_are_the_formula_s_rounded_once(name: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.tensor([0.0, -0.0, 1e-40, 88.0, -120.0])])
    leaf = x.double().requires_grad_()
    value = FORMULAS[name](leaf)
    value.sum().backward()
    assert leaf.grad is not None
    got = reference.plain(name, x)
    slope = reference.plain_backward(name, torch.ones_like(x), x)
    # Half a unit in the last place of float32, and what cancellation leaves of the formula in float64.
    assert torch.allclose(got.double(), value, rtol=6.1e-8, atol=1e-12)
    assert torch.allclose(slope.double(), leaf.grad, rtol=6.1e-8, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gated_silu_is_swiglu_forward(dtype: torch.dtype) -> None:
    packed = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_equal_bits(reference.gated("silu", packed), swiglu.swiglu_packed(packed), "gated silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squared_relu_is_exact_before_its_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = torch.where(x <= 0, 0.0, x.double() * x.double())
    assert_equal_bits(reference.plain("squared_relu", x), exact.to(torch.float32).to(dtype), "squared ReLU")


def test_special_values() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    assert reference.plain("relu", x).tolist()[1:] == [torch.inf, 0.0, 0.0]
    assert not torch.signbit(reference.plain("relu", x)[3])
    for name in FORMULAS:
        assert torch.isnan(reference.plain(name, x)[0])
        assert reference.plain(name, x)[1] == torch.inf


def test_an_element_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    for name in FORMULAS:
        assert_equal_bits(reference.plain(name, x)[17:18], reference.plain(name, x[17:18].clone()), name)


def config(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"activation_func": F.silu, "gated_linear_unit": True, **changes})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"activation_func": F.gelu}, "gelu"),
        ({"activation_func": torch.tanh}, "tanh"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value=7.0"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset=1.0"),
    ],
)
def test_what_has_no_portable_arithmetic_is_refused_by_name(changes: dict[str, object], found: str) -> None:
    with pytest.raises(NotCoveredError, match=found):
        activation_of(config(**changes))


def test_the_function_of_the_configuration_is_the_one_that_runs() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    got = activation_of(config(activation_func=F.relu, gated_linear_unit=False))(x)
    assert_equal_bits(got, reference.plain("relu", x), "relu")
    got = activation_of(config(activation_func=F.relu))(x)
    assert_equal_bits(got, reference.gated("relu", x), "gated relu")
