"""What the contract cannot cover is refused by value, rule and way out, and an unarmed model is not built at all."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_plugins.arguments import (
    ARGUMENT_RULES,
    HYBRID_SPEC,
    SPEC,
    WHOLE,
    add_flag,
    apply_flag,
    check_arguments,
)
from megatron_plugins.env_contract import VARIABLES, violations
from megatron_plugins.refusals import RULES, refusals
from patches.errors import NotCoveredError

ROOT = Path(__file__).resolve().parents[2]
FINE: dict[str, Any] = {
    "tensor_model_parallel_size": 4,
    "context_parallel_size": 2,
    "calculate_per_token_loss": True,
    "normalization": "RMSNorm",
    "num_query_groups": 8,
    "num_attention_heads": 32,
    "ffn_hidden_size": 12288,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "make_vocab_size_divisible_by": 256,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "deterministic_rocm": "invariant",
    "data_parallel_size": 4,
    "optimizer": "adam",
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.float32,
    "main_params_dtype": torch.float32,
}
BROKEN = [
    ({"fp8": "hybrid"}, "fp8='hybrid'", "bf16"),
    ({"num_moe_experts": 8}, "num_moe_experts=8", "dense"),
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2", "dense"),
    ({"hidden_dropout": 0.1}, "hidden_dropout=0.1", "--hidden-dropout 0"),
    ({"tp_comm_overlap": True}, "tp_comm_overlap=True", "--tp-comm-overlap"),
    ({"flash_decode": True}, "flash_decode=True", "drop --flash-decode"),
    ({"cpu_offloading": True}, "cpu_offloading=True", "switch them off"),
    ({"calculate_per_token_loss": False}, "context_parallel_size=2", "--calculate-per-token-loss"),
    ({"gtp_weight_remat_size": 2}, "gtp_weight_remat_size=2", "--tensor-parallel-num-weight-shards"),
    ({"normalization": "LayerNorm"}, "normalization='LayerNorm'", "--normalization RMSNorm"),
    ({"multi_latent_attention": True}, "multi_latent_attention=True", "grouped-query"),
    ({"attention_output_gate": True}, "attention_output_gate=True", "switch it off"),
    ({"apply_rope_fusion": True}, "apply_rope_fusion=True", "--no-rope-fusion"),
    ({"num_query_groups": 2}, "num_query_groups=2", "divides num_query_groups"),
    ({"fused_single_qkv_rope": True}, "fused_single_qkv_rope=True", "switch it off"),
    ({"mlp_chunks_for_training": 2}, "mlp_chunks_for_training=2", "leave it at 1"),
    (
        {"tensor_model_parallel_size": 3, "num_query_groups": 9},
        "tensor_model_parallel_size=3",
        "1, 2, 4 or 8",
    ),
    # NVIDIA/Megatron-LM#1754: an uneven division diverges silently.
    ({"ffn_hidden_size": 12290}, "ffn_hidden_size=12290 at tensor_model_parallel_size=4", "multiple of 8"),
]
ARGUMENTS = [
    ({"reset_attention_mask": True}, "reset_attention_mask=True", "packed_seq_params"),
    ({"make_vocab_size_divisible_by": 128}, "make_vocab_size_divisible_by=128", "divisible-by 256"),
    ({"untie_embeddings_and_output_weights": False}, "untie_embeddings", "--untie-embeddings"),
    ({"data_parallel_size": 6}, "data_parallel_size=6", "power of two"),
    ({"optimizer": "muon"}, "optimizer='muon'", "--optimizer adam"),
    ({"exp_avg_sq_dtype": torch.float16}, "exp_avg_sq_dtype=float16", "fp32 or bf16"),
    (
        {"main_params_dtype": "fp16", "exp_avg_dtype": "fp8"},
        "exp_avg_dtype=fp8, main_params_dtype=fp16",
        "fp32",
    ),
    ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True", "--optimizer-cpu-offload"),
    ({"use_megatron_fsdp": True}, "FSDP", "DistributedDataParallel"),
]


def test_a_covered_configuration_is_not_refused() -> None:
    assert refusals(SimpleNamespace(**FINE)) == []
    check_arguments(SimpleNamespace(**FINE))


@pytest.mark.parametrize(("change", "value", "way_out"), BROKEN, ids=lambda x: str(x)[:30])
def test_a_refusal_names_value_and_way_out(change: dict[str, Any], value: str, way_out: str) -> None:
    (sentence,) = refusals(SimpleNamespace(**{**FINE, **change}))
    assert value in sentence and way_out in sentence


@pytest.mark.parametrize(("change", "value", "way_out"), ARGUMENTS, ids=lambda x: str(x)[:30])
def test_an_argument_is_refused_before_the_model_is_built(
    change: dict[str, Any], value: str, way_out: str
) -> None:
    with pytest.raises(NotCoveredError) as error:
        check_arguments(SimpleNamespace(**{**FINE, **change}))
    assert value in str(error.value) and way_out in str(error.value)


def test_every_rule_has_a_case_here() -> None:
    def broken_by(changes: list[Any], rules: Any) -> set[int]:
        views = [SimpleNamespace(**{**FINE, **change}) for change, _, _ in changes]
        return {i for i, rule in enumerate(rules) if any(rule.applies(view) for view in views)}

    assert broken_by(BROKEN, RULES) == set(range(len(RULES)))
    assert broken_by(ARGUMENTS, ARGUMENT_RULES) == set(range(len(ARGUMENT_RULES)))


def test_all_broken_rules_are_told_at_once_and_nothing_is_rewritten() -> None:
    args = SimpleNamespace(**{**FINE, "fp8": "e4m3", "hidden_dropout": 0.1})
    before = dict(vars(args))
    with pytest.raises(NotCoveredError, match=r"(?s)fp8='e4m3'.*hidden_dropout=0.1"):
        check_arguments(args)
    assert vars(args) == before


def test_the_flag_selects_the_spec_only_where_the_user_gave_none() -> None:
    parser = add_flag(add_flag(argparse.ArgumentParser()))
    assert parser.parse_args([]).deterministic_rocm is None
    args = parser.parse_args(["--deterministic-rocm"])
    assert args.deterministic_rocm == "invariant"
    args.spec = None
    apply_flag(args, "invariant")
    assert args.spec == ["megatron_plugins.layer_specs", "deterministic_gpt_layer_spec"]
    stable = argparse.Namespace(deterministic_rocm="stable", spec=["mine", "spec"])
    apply_flag(stable, "stable")
    assert stable.spec == ["mine", "spec"]
    with pytest.raises(NotCoveredError, match="mine spec.*--deterministic-rocm=stable"):
        apply_flag(argparse.Namespace(deterministic_rocm=None, spec=["mine", "spec"]), "invariant")
    with pytest.raises(NotCoveredError, match="--deterministic-rocm=stable.*armed as 'invariant'"):
        apply_flag(argparse.Namespace(deterministic_rocm="stable", spec=None), "invariant")
    part = argparse.Namespace(deterministic_rocm=None, spec=[SPEC[0], "local_layer_with_deterministic_ffn"])
    with pytest.raises(NotCoveredError, match="deterministic_ffn.*the promise is for the whole.*stable"):
        apply_flag(part, "invariant")
    part.deterministic_rocm = "stable"
    apply_flag(part, "stable")
    assert "deterministic_aiter_gpt_layer_spec" in WHOLE
    for name in WHOLE:
        apply_flag(argparse.Namespace(deterministic_rocm=None, spec=[SPEC[0], name]), "invariant")


def test_a_hybrid_pattern_selects_the_stack_spec_where_megatron_core_has_hybrid_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib.util

    asked = ({"hybrid_layer_pattern": "*-"}, {"hybrid_override_pattern": "*-"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    for given in asked:
        args = argparse.Namespace(deterministic_rocm=None, spec=None, **given)
        apply_flag(args, "invariant")
        assert args.spec == HYBRID_SPEC
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for given in (*asked, {"spec": list(HYBRID_SPEC)}):
        args = argparse.Namespace(**{"deterministic_rocm": None, "spec": None, **given})
        with pytest.raises(NotCoveredError, match="HybridModel.*from 0.18 on.*Drop --hybrid-layer-pattern"):
            apply_flag(args, "invariant")


def test_environment_variables_are_judged_not_set() -> None:
    assert violations("invariant", {}) == []
    (sentence,) = violations("stable", {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO='1'" in sentence and "export" in sentence
    # CK's backward uses atomics unless told otherwise, but only where that backward is switched on.
    (sentence,) = violations("stable", {"NVTE_CK_USES_BWD_V3": "1"})
    assert sentence.startswith("NVTE_CK_IS_V3_ATOMIC_FP32=unset")
    (sentence,) = violations("stable", {"NVTE_CK_V3_ATOMIC_FP32": "0"})
    assert "read by nobody" in sentence and "NVTE_CK_IS_V3_ATOMIC_FP32" in sentence
    before = dict(os.environ)
    violations("invariant")
    assert dict(os.environ) == before
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize("mode", ["", "stable", "invariant"])
def test_an_unarmed_process_cannot_build_a_deterministic_module(mode: str) -> None:
    program = """
import sys, patches.auto
from types import SimpleNamespace
from patches.errors import NotCoveredError
from megatron_plugins.modules.guard import require_supported
try:
    require_supported(SimpleNamespace())
    print("covered")
    require_supported(SimpleNamespace(fp8="hybrid"))
except NotCoveredError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "DETERMINISTIC_ROCM": mode},
        capture_output=True,
        text=True,
        check=True,
    )
    if mode:
        assert done.stdout.startswith("covered\n") and "fp8='hybrid'" in done.stdout
    else:
        assert "not armed" in done.stdout and "DETERMINISTIC_ROCM=invariant" in done.stdout
