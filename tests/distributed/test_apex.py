"""Where apex is importable: its norm is refused by name, its gradient norm and fused weight gradient never compute.

apex here is a package of the same names whose every computation raises; megatron-core takes it for the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_apex

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, sys, tempfile
from dataclasses import replace
import patches.auto
sys.path.insert(0, "tests")
from megatron_plugins.verify.model import on_cpu
on_cpu.install()
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
import megatron.core.models.gpt
import small_model
from megatron.core.fusions import fused_layer_norm
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron_plugins import layer_specs
from patches.errors import GateError

said = {
    "norm": fused_layer_norm.HAVE_FUSED_LAYER_NORM,
    "l2": clip_grads.l2_norm_impl.__module__ == "amp_C",
    "wgrad": layers._grad_accum_fusion_available,
}
layout = small_model.layout_of()
small_model.initialize(layout)
plain = small_model.config_for
small_model.config_for = lambda *a: replace(plain(*a), gradient_accumulation_fusion=True)
spec = layer_specs.get_deterministic_gpt_layer_spec()
model = small_model.build(layout, torch.bfloat16, spec)
small_model.fill_by_name(model)
for parameter in model.parameters():
    parameter.main_grad = torch.zeros(parameter.shape)
tokens = small_model.byte_tokens(__import__("pathlib").Path("docs"), 1)
small_model.step(model, layout, tokens[0])
grads = [p.main_grad for p in model.parameters() if bool(p.main_grad.any())]
said["fused gradients"] = len(grads)
said["norm of gradients"] = float(clip_grads.get_grad_norm_fp32(grads))

from apex.normalization import FusedRMSNorm
class Norm(FusedRMSNorm):
    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        return FusedRMSNorm(hidden_size, eps)
spec = layer_specs.get_deterministic_gpt_layer_spec()
spec.submodules.input_layernorm = Norm
model = small_model.build(layout, torch.bfloat16, spec)
try:
    small_model.step(model, layout, tokens[0])
except GateError as error:
    said["refused"] = str(error)
print(json.dumps(said))
"""


def test_apex_is_refused_by_name_or_never_computes(tmp_path: Path) -> None:
    folder = fake_apex.write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "DETERMINISTIC_ROCM": "invariant", "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The ledger may add at exit which overrides were never called.
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"norm"')))
    assert said["norm"] and said["l2"] and said["wgrad"], "megatron-core did not take the package for apex"
    # Gradients of linears went into main_grad, and their norm was computed, without a call into apex.
    assert said["fused gradients"] >= 8 and said["norm of gradients"] > 0
    assert "apex.normalization.fused_layer_norm.FusedRMSNorm: apex's fused norms sum" in said["refused"]
