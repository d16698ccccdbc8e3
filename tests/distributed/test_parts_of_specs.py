"""Each deterministic part alone in upstream's spec: mode stable runs it, mode invariant refuses it by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys, tempfile
import patches, patches.auto
sys.path.insert(0, "tests")
from megatron_plugins.verify.model import on_cpu
on_cpu.install()
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
import megatron.core.models.gpt
import small_model
from pathlib import Path
from megatron_plugins import layer_specs
from megatron_plugins.parts import PARTS
from patches.errors import GateError, NotCoveredError

layout = small_model.layout_of()
small_model.initialize(layout)
tokens = small_model.byte_tokens(Path("docs"), 1)
said = {}
for part in PARTS:
    model = small_model.build(layout, torch.bfloat16, getattr(layer_specs, f"local_layer_with_deterministic_{part}"))
    ours = {n.split("layers.0.")[1] for n, m in model.named_modules()
            if "layers.0." in n and type(m).__module__.startswith("megatron_plugins")}
    outer = (model.embedding.word_embeddings, model.output_layer, model.decoder.final_layernorm)
    outer = [type(module).__name__ for module in outer]
    try:
        losses = []
        for _ in range(2):
            torch.manual_seed(0)
            small_model.fill_by_name(model)
            losses.append(small_model.step(model, layout, tokens[0], side="upstream")["loss"])
        gate = "" if torch.equal(*losses) else "another loss"
    except GateError as error:
        gate = str(error)
    said[part] = {"ours": sorted(ours), "outer": outer, "gate": gate}
refused = []
for arguments in (("loss",), (), ("ffn", "norms", "x")):
    try:
        layer_specs.get_gpt_layer_spec_with(*arguments)
    except NotCoveredError as error:
        refused.append(str(error))
try:
    layer_specs.get_gpt_layer_spec_with("ffn", base="te")
except NotCoveredError as error:
    refused.append(str(error))
config = small_model.config_for(layout, torch.bfloat16)
block = layer_specs.get_deterministic_gpt_decoder_block_spec(config, True, vp_stage=None)
said["block"] = [len(block.layer_specs), block.layer_norm.__name__]
said["refused"] = refused
print(json.dumps(said))
"""
ATTENTION = "self_attention"
OURS = {
    "ffn": ["mlp", "mlp.linear_fc1", "mlp.linear_fc2"],
    "linears": ["mlp.linear_fc1", "mlp.linear_fc2", f"{ATTENTION}.linear_proj", f"{ATTENTION}.linear_qkv"],
    "core_attention": [f"{ATTENTION}.core_attention"],
    "norms": [
        "input_layernorm",
        "pre_mlp_layernorm",
        f"{ATTENTION}.k_layernorm",
        f"{ATTENTION}.q_layernorm",
    ],
}


def run(mode: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "DETERMINISTIC_ROCM": mode, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["stable", "invariant"])
def test_a_part_is_what_was_asked_for_and_nothing_else(mode: str) -> None:
    said = run(mode)
    assert {part: said[part]["ours"] for part in OURS} == OURS
    for part in OURS:
        if mode == "stable":
            assert said[part]["gate"] == ""
            assert not any(name.startswith("Deterministic") for name in said[part]["outer"])
        else:
            assert "promises the same bits in every layout, but nobody owns" in said[part]["gate"]
    assert said["block"] == [2, "DeterministicRMSNorm"]
    unknown, none, some, te = said["refused"]
    assert "['loss']" in unknown and "core_attention" in unknown and "(none)" in none and "['x']" in some
    assert "TransformerEngine is not installed" in te
