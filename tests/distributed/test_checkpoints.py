"""Checkpoints of deterministic and of upstream's models are interchangeable: same names, same shapes, same bits.

Compared is what a model tells Megatron's distributed checkpointing about its tensors (key, whole shape, this rank's
offset, shape, copies, dtype): that is all the library writes and looks up by. Plain state dicts are loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
SPECS = ("upstream", "ours", "TE names")
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def te_name(name: str) -> str:
    """A parameter's name in TransformerEngine's spec."""
    for local, te in TE_NAMES.items():
        name = name.replace(local, te)
    return name


def build(spec: str, tp: int) -> Any:
    """The small model with weights that depend on names and shapes alone."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import small_model
    from megatron_plugins import layer_specs

    specs = {
        "upstream": get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True),
        "ours": layer_specs.deterministic_gpt_layer_spec,
        "TE names": layer_specs.deterministic_gpt_layer_spec_with_te_names,
    }
    layout = small_model.layout_of(tp)
    small_model.initialize(layout)
    # Upstream's norms are born in float32; Megatron's Float16Module converts a model as this does.
    model = small_model.build(layout, torch.bfloat16, specs[spec]).bfloat16()
    small_model.fill_by_name(model, te_name)
    return model


def described(sharded: Any) -> dict[str, Any]:
    """Key in the checkpoint -> how the tensor is cut; extra states and other objects are left out."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = {}
    waiting = list(sharded.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, ShardedTensorFactory):
            value = value.build()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, ShardedTensor):
            cut = (value.global_shape, value.global_offset, value.local_shape, value.replica_id, value.dtype)
            found[f"{value.key} {value.global_offset}"] = str(cut)
    return found


def describe(rank: int, world: int) -> dict[str, Any]:
    return {spec: described(build(spec, world).sharded_state_dict(prefix="")) for spec in SPECS}


def test_tensors_are_cut_over_ranks_as_upstream_cuts_them() -> None:
    ranks = run_ranks(
        2,
        describe,
        env={"DETERMINISTIC_ROCM": "invariant"},
        imports=("patches.auto", "megatron.core.models.gpt"),
    )
    for found in ranks:
        assert len(found["upstream"]) > 10
        assert any("linear_qkv.layer_norm_weight" in key for key in found["upstream"])
        for spec in SPECS[1:]:
            assert found[spec] == found["upstream"], spec


def load(rank: int, world: int) -> dict[str, Any]:
    """A plain state dict of every spec loaded by every spec, norms renamed where the names say so; and what differs."""
    import torch

    models = {spec: build(spec, world) for spec in SPECS}
    differ, compared = [], 0
    for reader, wanted in models.items():
        renamed = {te_name(name): name for name, _ in wanted.named_parameters()}
        for writer in models.values():
            model = build(reader, world)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            written = {renamed[te_name(name)]: value for name, value in writer.named_parameters()}
            model.load_state_dict(written, strict=False)
            for (name, got), (_, want) in zip(
                model.named_parameters(), wanted.named_parameters(), strict=True
            ):
                compared += 1
                if not torch.equal(got, want):
                    differ.append((reader, name))
    names = {spec: sorted(name for name, _ in model.named_parameters()) for spec, model in models.items()}
    return {"differ": differ, "compared": compared, "names": names}


def test_what_one_spec_writes_every_spec_loads() -> None:
    for found in run_ranks(2, load, **ARMED):
        assert found["differ"] == [] and found["compared"] > 100
        assert found["names"]["ours"] == found["names"]["upstream"]
        assert found["names"]["TE names"] == sorted(map(te_name, found["names"]["ours"]))
        assert found["names"]["TE names"] != found["names"]["ours"]
