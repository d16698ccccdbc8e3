"""Relative error against float64 of the block's output: bf16 lanes, float32 lanes, and Qwen3MLP's own arithmetic."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from megatron_plugins.verify.ffn import block
from te_overrides.kernels.gemm.ops import lane_tree, one_lane
from te_overrides.kernels.swiglu.ops import swiglu_packed

MOST = {"bf16 lanes": 1.5, "float32 lanes": 1.02}
"""How many times Qwen3MLP's error ours may be."""


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """``|got - exact| / |exact|`` in the Euclidean norm, float64."""
    return float((got.double() - exact).norm() / exact.norm())


def _qwen(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Qwen3MLP's output, by transformers where that is installed, else by its three torch calls."""
    gate, up = first.chunk(2)
    if importlib.util.find_spec("transformers") is None:
        return F.linear(
            F.silu(F.linear(x, gate)) * F.linear(x, up), second
        ), "its calls, without transformers"
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    config = Qwen3Config(hidden_size=x.shape[1], intermediate_size=gate.shape[0], hidden_act="silu")
    module = Qwen3MLP(config).to(x.device, x.dtype)
    with torch.no_grad():
        for linear, weight in ((module.gate_proj, gate), (module.up_proj, up), (module.down_proj, second)):
            linear.weight.copy_(weight)
        return module(x), "transformers"


def errors(
    rank: int, world: int, rows: int, hidden: int, intermediate: int, device: str
) -> dict[str, float | str]:
    """Errors by name, and where Qwen3MLP's came from."""
    first, second = block.whole_weights(hidden, intermediate, device)
    x, _ = block.tokens(rows, hidden, device)
    gate, up = (x.double() @ half.double().t() for half in first.chunk(2))
    exact = (F.silu(gate) * up) @ second.double().t()
    h = swiglu_packed(one_lane(x, first))
    theirs, source = _qwen(x, first, second)
    wide = lane_tree(h, second, tp_size=1, dtype=torch.float32).to(x.dtype)
    return {
        "Qwen3MLP": relative_error(theirs, exact),
        "bf16 lanes": relative_error(lane_tree(h, second, tp_size=1), exact),
        "float32 lanes": relative_error(wide, exact),
        "peer": source,
    }
