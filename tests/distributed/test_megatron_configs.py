"""Configurations beside the quick start's: the same bits on one rank and on TP2 x CP2 + SP, every gradient included.

Weights depend on names and shapes alone, so a configuration that takes effect shows against the plain one of its dtype:
other logits, other parameters, another dtype, or the same bits computed once more.
"""

from __future__ import annotations

import sys
from collections import Counter
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
WINDOW = 40
CONFIGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "biases": (torch.bfloat16, {"add_bias_linear": True}),
    "QKV bias, no q/k-norm": (torch.float32, {"add_qkv_bias": True, "qk_layernorm": False}),
    "fp16": (torch.float16, {"fp16": True}),
    "weights around zero": (torch.bfloat16, {"layernorm_zero_centered_gamma": True}),
    "float32 residual": (torch.bfloat16, {"fp32_residual_connection": True}),
    "interleaved RoPE": (torch.bfloat16, {"rotary_interleaved": True}),
    "full recompute": (
        torch.bfloat16,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "selective recompute": (torch.bfloat16, {"recompute_granularity": "selective"}),
    "multi-head attention": (torch.bfloat16, {"num_query_groups": 8}),
    "sliding window": (torch.bfloat16, {"window_size": (WINDOW, 0)}),
}
PLAIN: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain bfloat16": (torch.bfloat16, {}),
    "plain float32": (torch.float32, {}),
}


def run_configs(rank: int, world: int, tp: int, cp: int, sp: bool) -> dict[str, Any]:
    """Whole results of every configuration after one micro-batch, and what was refused."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import small_model

    layout = small_model.layout_of(tp, cp, sp)
    small_model.initialize(layout)
    tokens = small_model.byte_tokens(ROOT / "docs", 1)
    plain, out = small_model.config_for, {}
    for name, (dtype, changes) in {**PLAIN, **CONFIGS}.items():

        def changed(*args: Any, _changes: dict[str, Any] = changes) -> Any:
            config = plain(*args)
            known = {field: value for field, value in _changes.items() if hasattr(config, field)}
            assert known == _changes, f"megatron-core has no {_changes.keys() - known.keys()}"
            return replace(config, **_changes)

        small_model.config_for = changed
        model = small_model.build(layout, dtype)
        calls: Counter[str] = Counter()
        layer = model.decoder.layers[0]
        layer.register_forward_hook(lambda *_, _calls=calls: _calls.update(["layer"]))
        layer.self_attention.core_attention.register_forward_hook(
            lambda *_, _calls=calls: _calls.update(["attention"])
        )
        results = small_model.run_model(model, layout, tokens)
        out[name] = {**results, "calls": dict(calls)} if rank == 0 else None
    small_model.config_for = plain
    return out


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    (one,) = run_ranks(1, run_configs, 1, 1, False, **ARMED)
    return one, run_ranks(4, run_configs, 2, 2, True, **ARMED)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_has_one_result(name: str, results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    want, got = results[0][name], results[1][name]
    for what in ("logits", "logprobs", "loss"):
        assert_equal_bits(got[what], want[what], f"{name}: {what}")
    assert got["gradients"].keys() == want["gradients"].keys()
    for parameter, gradient in want["gradients"].items():
        assert bool(torch.isfinite(gradient).all()) and bool((gradient != 0).any()), (
            f"{parameter} has no gradient"
        )
        assert_equal_bits(got["gradients"][parameter], gradient, f"{name}: gradient of {parameter}")


def test_biases_are_parameters_of_every_linear_layer(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, biases = results[0]["plain bfloat16"], results[0]["biases"]
    linears = {name.removesuffix("weight") for name in plain["gradients"] if ".linear_" in name}
    assert biases["gradients"].keys() - plain["gradients"].keys() == {f"{name}bias" for name in linears}
    assert not torch.equal(biases["logits"], plain["logits"])


def test_a_qkv_bias_comes_alone_and_the_norms_of_q_and_k_go(
    results: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    plain, changed = (
        results[0][name]["gradients"].keys() for name in ("plain float32", "QKV bias, no q/k-norm")
    )
    assert {name.split("self_attention.")[1] for name in changed - plain} == {"linear_qkv.bias"}
    assert {name.split("self_attention.")[1] for name in plain - changed} == {
        "q_layernorm.weight",
        "k_layernorm.weight",
    }


def test_fp16_computes_in_fp16(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fp16, plain = results[0]["fp16"], results[0]["plain bfloat16"]
    assert fp16["logits"].dtype is torch.float16 and plain["logits"].dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["weights around zero", "float32 residual", "interleaved RoPE"])
def test_the_setting_changes_the_logits_of_the_same_weights(
    name: str, results: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    changed, plain = results[0][name], results[0]["plain bfloat16"]
    assert changed["gradients"].keys() == plain["gradients"].keys()
    assert not torch.equal(changed["logits"], plain["logits"])


def test_every_head_has_keys_and_values_of_its_own(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    prefix = "decoder.layers.0.self_attention."
    grouped, own = (results[0][name]["gradients"] for name in ("plain bfloat16", "multi-head attention"))
    queries = own[f"{prefix}linear_proj.weight"].shape[1]
    assert own[f"{prefix}linear_qkv.weight"].shape[0] == 3 * queries
    assert grouped[f"{prefix}linear_qkv.weight"].shape[0] < 3 * queries


def test_a_window_hides_what_lies_before_it_and_nothing_else(
    results: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """The first query that misses a key is the one behind the window; before it not a bit changes."""
    window, plain = results[0]["sliding window"]["logits"], results[0]["plain bfloat16"]["logits"]
    sees_all = slice(0, WINDOW + 1)
    assert_equal_bits(window[:, :, sees_all], plain[:, :, sees_all], "logits of tokens that see all keys")
    assert not torch.equal(window[:, :, WINDOW + 1], plain[:, :, WINDOW + 1])


@pytest.mark.parametrize(
    ("name", "again"),
    [("full recompute", {"layer": 1, "attention": 1}), ("selective recompute", {"attention": 1})],
    ids=["full", "selective"],
)
def test_what_is_recomputed_gives_the_bits_of_what_was_kept(
    name: str, again: dict[str, int], results: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    got, plain = results[0][name], results[0]["plain bfloat16"]
    assert Counter(got["calls"]) - Counter(plain["calls"]) == Counter(again)
    assert_equal_bits(got["logits"], plain["logits"], name)
    for parameter, gradient in plain["gradients"].items():
        assert_equal_bits(got["gradients"][parameter], gradient, f"{name}: gradient of {parameter}")


def test_every_configuration_is_compared_with_the_plain_one() -> None:
    """A configuration added to the table without such a comparison would pass where it takes no effect."""
    source = Path(__file__).read_text().partition("def results(")[2]
    assert [name for name in CONFIGS if f'"{name}"' not in source] == []
