"""Configurations beside the quick start's: the same bits on one rank and on TP2 x CP2 + SP, every gradient included."""

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
    "sliding window": (torch.bfloat16, {"window_size": (40, 0)}),
}


def run_configs(rank: int, world: int, tp: int, cp: int, sp: bool) -> dict[str, Any]:
    """Whole results of every configuration after one micro-batch, and what was refused."""
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
    import megatron_on_cpu

    megatron_on_cpu.install()
    import step0_engine
    import step0_model

    layout = step0_model.Layout("", tp, cp, sp)
    step0_model.initialize(layout)
    tokens = step0_model.byte_tokens(ROOT / "docs", 1)
    plain, out = step0_model.config_for, {}
    for name, (dtype, changes) in CONFIGS.items():

        def changed(*args: Any, _changes: dict[str, Any] = changes) -> Any:
            config = plain(*args)
            known = {field: value for field, value in _changes.items() if hasattr(config, field)}
            assert known == _changes, f"megatron-core has no {_changes.keys() - known.keys()}"
            return replace(config, **_changes)

        step0_model.config_for = changed
        model = step0_model.build(layout, dtype, step0_engine._spec("deterministic"))
        step0_model.fill_by_name(model)
        results = step0_engine._run_model(model, layout, tokens, step0_engine._functions("deterministic"))
        out[name] = results[1] if rank == 0 else None
    step0_model.config_for = plain
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
