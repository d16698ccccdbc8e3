"""Whole specs beside the default, activations beside SwiGLU, and frozen weights, in a real megatron-core GPT.

Each has one result on one rank and on TP2 x CP2 + SP, every gradient included.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
# Configuration -> spec of megatron_plugins.layer_specs, gated or plain, activation of megatron.core or torch.
CASES: dict[str, tuple[str, bool, str]] = {
    "default": ("deterministic_gpt_layer_spec", True, "silu"),
    "names of TransformerEngine": ("deterministic_gpt_layer_spec_with_te_names", True, "silu"),
    "two-lane": ("deterministic_gpt_layer_spec_two_lane", True, "silu"),
    "squared ReLU": ("deterministic_gpt_layer_spec", False, "squared_relu"),
    "tanh GEGLU": ("deterministic_gpt_layer_spec", True, "fast_gelu"),
    "quick GELU": ("deterministic_gpt_layer_spec", False, "quick_gelu"),
}
TE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def local_name(name: str) -> str:
    """A parameter's name in Megatron's local spec."""
    for te, local in TE_NAMES.items():
        name = name.replace(te, local)
    return name


def run_cases(rank: int, world: int, tp: int, cp: int, sp: bool) -> dict[str, Any]:
    """Whole results of every case after one micro-batch, under the names of the local spec."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import megatron.core.activations as activations

    import small_model
    from megatron_plugins import layer_specs
    from megatron_plugins.modules import input_gradient

    layout = small_model.layout_of(tp, cp, sp)
    small_model.initialize(layout)
    tokens = small_model.byte_tokens(ROOT / "docs", 1)
    plain, out = small_model.config_for, {}

    def run(name: str, model: Any) -> None:
        results = small_model.run_model(model, layout, tokens)
        results["gradients"] = {local_name(n): g for n, g in results["gradients"].items()}
        out[name] = results if rank == 0 else None

    for name, (spec, gated, activation) in CASES.items():
        function = getattr(torch.nn.functional, activation, None) or getattr(activations, activation)

        def changed(*args: Any, _gated: bool = gated, _function: Any = function) -> Any:
            return replace(plain(*args), gated_linear_unit=_gated, activation_func=_function)

        small_model.config_for = changed
        model = small_model.build(layout, torch.bfloat16, getattr(layer_specs, spec))
        small_model.fill_by_name(model, local_name)
        run(name, model)
        if name == "two-lane":
            model.zero_grad()
            input_gradient.PACKED_BYTES = 0
            run("two-lane, sent one by one", model)
        if name == "default":
            # Only the norms of the first layer learn: nothing else may need a gradient or change theirs.
            for parameter_name, parameter in model.named_parameters():
                parameter.requires_grad_("layers.0" in parameter_name and "layernorm" in parameter_name)
                parameter.grad = None
            small_model.step(model, layout, tokens[0])
            assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            found = small_model.whole_gradients(model, layout)
            out["frozen"] = {n: g for n, g in found.items() if "layers.0" in n and "layernorm" in n}
    small_model.config_for = plain
    return out


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    (one,) = run_ranks(1, run_cases, 1, 1, False, **ARMED)
    return one, run_ranks(4, run_cases, 2, 2, True, **ARMED)[0]


def assert_equal_results(got: dict[str, Any], want: dict[str, Any], name: str) -> None:
    for what in ("logits", "logprobs", "loss"):
        assert_equal_bits(got[what], want[what], f"{name}: {what}")
    assert got["gradients"].keys() == want["gradients"].keys()
    for parameter, gradient in want["gradients"].items():
        assert bool((gradient != 0).any()), f"{parameter} has no gradient"
        assert_equal_bits(got["gradients"][parameter], gradient, f"{name}: gradient of {parameter}")


@pytest.mark.parametrize("name", CASES)
def test_the_case_has_one_result(name: str, results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert_equal_results(results[1][name], results[0][name], name)


def test_names_of_transformer_engine_change_no_bit(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert_equal_results(results[0]["names of TransformerEngine"], results[0]["default"], "TE names")


def test_the_two_lane_form_has_bits_of_its_own_whichever_way_its_sums_travel(
    results: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for one in results:
        assert_equal_results(one["two-lane, sent one by one"], one["two-lane"], "two-lane")
    packed, apart = results[0]["default"], results[0]["two-lane"]
    assert_equal_bits(apart["logits"], packed["logits"], "the forward is the same")
    changed = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(apart["gradients"][changed], packed["gradients"][changed])
    last = "decoder.layers.1.mlp.linear_fc1.weight"
    assert_equal_bits(apart["gradients"][last], packed["gradients"][last], "before the first dX")


def test_what_learns_beside_frozen_weights_has_the_same_gradient(
    results: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for one, name in zip(results, ("one rank", "four ranks"), strict=True):
        assert len(one["frozen"]) == 4
        for parameter, gradient in one["frozen"].items():
            assert_equal_bits(gradient, results[0]["default"]["gradients"][parameter], f"{name}: {parameter}")


def test_every_activation_gives_logits_of_its_own(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    kinds = ["default", "squared ReLU", "tanh GEGLU", "quick GELU"]
    found = [results[0][name]["logits"] for name in kinds]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
