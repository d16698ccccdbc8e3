"""megatron-core's HybridModel of attention and MLP layers: one result in every layout, the GPTModel's of those weights.

Against unpacked releases, since the newest megatron-core on Python 3.11 has no HybridModel.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from procs import run_ranks
from upstream_wheels import MEGATRON_CORE, sources

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = [version for version in MEGATRON_CORE if tuple(map(int, version.split("."))) >= (0, 18)]
LAYOUTS = {"TP1": (1, 1, False), "TP2": (2, 1, False), "TP2+SP": (2, 1, True), "CP2": (1, 2, False)}
PACKED = ("TP1", "CP2")
REFUSED = {"M*-": "MAMBA 'M' at 0", "*-*E": "MOE 'E' at 3", "*G-D": "GDN 'G' at 1; DS_ATTENTION 'D' at 3"}


def gpt_name(name: str) -> str:
    """The name in a GPTModel (TransformerEngine's names) of a parameter in a hybrid of alternating layers."""
    name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    return re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) // 2}.", name)


def _prepare() -> Any:
    sys.path[:0] = [str(ROOT / "tests")]
    import small_model

    return small_model


def _hybrid(layout: Any, pattern: str, spec: Any = None) -> Any:
    small_model = _prepare()
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_plugins.hybrid_specs import deterministic_hybrid_stack_spec
    from megatron_plugins.verify.model import build as building

    layers = len(re.sub(r"/.*|\|", "", pattern))
    model = HybridModel(
        config=replace(small_model.config_for(layout, torch.bfloat16), num_layers=layers),
        hybrid_stack_spec=spec or deterministic_hybrid_stack_spec,
        vocab_size=small_model.VOCABULARY,
        max_sequence_length=small_model.SEQUENCE * small_model.BATCH,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        rotary_base=1000000,
        share_embeddings_and_output_weights=False,
    )
    building.fill_by_name(model, gpt_name, small_model.shape().init_std)
    return model


def _pack(model: Any, layout: Any, batch: torch.Tensor) -> dict[str, Any]:
    """Loss a token and gradients of the rows of `batch` [B, S + 1] laid one after the other."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from te_overrides.kernels.zigzag.reference import packed_rank_rows

    small_model = _prepare()
    length = batch.shape[1] - 1
    bounds = torch.arange(0, batch.shape[0] * length + 1, length, dtype=torch.int32)
    held = [packed_rank_rows(bounds.tolist(), layout.cp, rank, "zigzag") for rank in range(layout.cp)]
    mine = held[parallel_state.get_context_parallel_rank()]
    ids, labels = (part.reshape(1, -1)[:, mine] for part in (batch[:, :-1], batch[:, 1:]))
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
    )
    model.zero_grad(set_to_none=True)
    loss = model(ids, (mine % length).unsqueeze(0), None, labels=labels, packed_seq_params=packing)
    loss.sum().backward()
    parts = small_model.gather(loss.detach(), parallel_state.get_context_parallel_group())
    whole = torch.empty(1, int(bounds[-1]), dtype=loss.dtype)
    for rows, part in zip(held, parts, strict=True):
        whole[:, rows] = part
    return {
        "loss": whole.view(batch.shape[0], length),
        "gradients": small_model.whole_gradients(model, layout),
    }


def _refusal(act: Any) -> str:
    from patches.errors import OverrideError

    try:
        act()
    except OverrideError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def run_hybrid(rank: int, world: int) -> dict[str, Any]:
    """Results of a hybrid in every layout and of the GPTModel, names of parameters, and what is refused how."""
    small_model = _prepare()
    import megatron.core

    import patches
    from megatron_plugins.hybrid_specs import get_deterministic_hybrid_stack_spec
    from megatron_plugins.layer_specs import deterministic_gpt_layer_spec_with_te_names

    tokens = small_model.byte_tokens(ROOT / "docs", 2)
    out: dict[str, Any] = {"version": megatron.core.__version__}
    pattern = "*-" * small_model.LAYERS
    for name, degrees in LAYOUTS.items():
        layout = small_model.layout_of(*degrees)
        small_model.initialize(layout)
        model = _hybrid(layout, pattern)
        out[name] = small_model.run_model(model, layout, tokens)
        out[f"{name} parameters"] = {
            key: tuple(parameter.shape) for key, parameter in model.named_parameters()
        }
        joined = [
            type(getattr(layer, add)).__name__
            for layer in model.decoder.layers
            for add in ("self_attn_bda", "mlp_bda")
        ]
        if name in PACKED:
            out[f"{name} packed"] = _pack(model, layout, tokens[0])
        out[f"{name} joined"] = joined.count("AddBeforeNorm")
    layout = small_model.layout_of()
    small_model.initialize(layout)
    gpt = small_model.build(layout, torch.bfloat16, deterministic_gpt_layer_spec_with_te_names)
    out["GPT"] = small_model.run_model(gpt, layout, tokens)
    out["GPT parameters"] = {key: tuple(parameter.shape) for key, parameter in gpt.named_parameters()}
    out["hybrid sharded"] = _sharded(_hybrid(layout, pattern))
    out["states"] = {id: entry.state for id, entry in patches.current_ledger().entries.items()}

    refused = {kinds: _refusal(lambda kinds=kinds: _hybrid(layout, kinds)) for kinds in REFUSED}
    refused["MTP"] = _refusal(lambda: _hybrid(layout, "*-/*-"))
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    spoiled = get_deterministic_hybrid_stack_spec()
    spoiled.submodules.attention_layer.submodules.self_attention.submodules.linear_proj = RowParallelLinear
    model = _hybrid(layout, "*-", spoiled)
    refused["gate"] = _refusal(lambda: small_model.step(model, layout, tokens[0]))
    return {**out, "refused": refused}


def _sharded(model: Any) -> list[str]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found, waiting = set(), list(model.sharded_state_dict(prefix="").values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, ShardedTensorFactory):
            value = value.build()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, ShardedTensor):
            found.add(value.key)
    return sorted(found)


@pytest.fixture(scope="module", params=VERSIONS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    environment = {
        "DETERMINISTIC_ROCM": "invariant",
        "MEGATRON_SOURCES": str(sources(request.param, "megatron-core")),
    }
    report: dict[str, Any] = run_ranks(
        2,
        run_hybrid,
        timeout=240,
        env=environment,
        imports=("megatron_cpu.armed_megatron", "megatron.core.models.gpt"),
    )[0]
    assert report["version"].partition("+")[0] == request.param
    return report


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "TP1"])
def test_a_hybrid_has_one_result_in_every_layout(layout: str, found: dict[str, Any]) -> None:
    got, want = found[layout], found["TP1"]
    for what in ("logits", "logprobs", "loss"):
        assert_equal_bits(got[what], want[what], f"{layout}: {what}")
    assert got["gradients"].keys() == want["gradients"].keys()
    for parameter, gradient in want["gradients"].items():
        assert bool((gradient != 0).any()), f"{parameter} has no gradient"
        assert_equal_bits(got["gradients"][parameter], gradient, f"{layout}: gradient of {parameter}")


def test_packed_sequences_have_one_result_at_every_degree(found: dict[str, Any]) -> None:
    got, want = found["CP2 packed"], found["TP1 packed"]
    assert_equal_bits(got["loss"], want["loss"], "loss of a pack at CP2")
    for parameter, gradient in want["gradients"].items():
        assert bool((gradient != 0).any()), f"{parameter} has no gradient"
        assert_equal_bits(got["gradients"][parameter], gradient, f"pack at CP2: gradient of {parameter}")


def test_a_hybrid_of_alternating_layers_is_the_gpt_of_its_weights(found: dict[str, Any]) -> None:
    hybrid, gpt = found["TP1"], found["GPT"]
    for what in ("logits", "logprobs", "loss"):
        assert_equal_bits(hybrid[what], gpt[what], what)
    assert sorted(map(gpt_name, hybrid["gradients"])) == sorted(gpt["gradients"])
    for parameter, gradient in hybrid["gradients"].items():
        assert_equal_bits(gradient, gpt["gradients"][gpt_name(parameter)], f"gradient of {parameter}")


def test_parameters_have_the_names_of_upstreams_stack_spec(found: dict[str, Any]) -> None:
    """Upstream's spec has TransformerEngine's linears with norms in them, and calls the last norm final_norm."""
    hybrid = found["TP1 parameters"]
    assert {gpt_name(name): shape for name, shape in hybrid.items()} == found["GPT parameters"]
    assert {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_norm.weight",
    } <= hybrid.keys()
    assert found["hybrid sharded"] == sorted(hybrid), "keys of a distributed checkpoint"


def test_every_residual_add_is_one_pass_with_the_norm_behind_it(found: dict[str, Any]) -> None:
    layers = {name.split(".")[2] for name in found["TP1 parameters"] if ".layers." in name}
    assert {found[f"{layout} joined"] for layout in LAYOUTS} == {len(layers)}


def test_the_gate_hangs_on_the_hybrid(found: dict[str, Any]) -> None:
    assert found["states"]["megatron.hybrid_model.outer_parts"] == "VERIFIED"
    assert "decoder.layers.0.self_attention.linear_proj" in found["refused"]["gate"]
    assert "megatron_plugins.hybrid_specs deterministic_hybrid_stack_spec" in found["refused"]["gate"]


@pytest.mark.parametrize(("pattern", "words"), [*REFUSED.items(), ("MTP", "multi-token prediction ('*-')")])
def test_layers_outside_the_contract_are_refused_by_name(
    pattern: str, words: str, found: dict[str, Any]
) -> None:
    assert found["refused"][pattern].startswith("NotCoveredError") and words in found["refused"][pattern]
