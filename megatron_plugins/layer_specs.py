"""Layer specs that select the deterministic modules.

``--spec megatron_plugins.layer_specs deterministic_gpt_layer_spec`` takes the ModuleSpec object: Megatron returns the
attribute without calling it. Callers that call (Megatron-Bridge, mbridge, verl providers) take
`get_deterministic_gpt_layer_spec`, which has the same content and ignores the arguments that other spec functions take.

Parts of a GPT model outside the layer spec (embedding, final norm, output layer, loss, RoPE) are taken over when a
GPTModel is built with this spec: see `megatron_plugins.overrides`.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_plugins.modules.aiter_core_attention import AiterCoreAttention
from megatron_plugins.modules.core_attention import DeterministicCoreAttention
from megatron_plugins.modules.linear import DeterministicColumnParallelLinear, DeterministicRowParallelLinear
from megatron_plugins.modules.mlp import DeterministicMLP
from megatron_plugins.modules.norm import DeterministicQKNorm, DeterministicRMSNorm
from megatron_plugins.modules.residual import get_deterministic_bias_dropout_add


def _deterministic_mlp(upstream: Any) -> Any:
    """The MLP entry with our classes: a ModuleSpec up to megatron-core 0.17, a functools.partial from 0.18."""
    is_partial = isinstance(upstream, functools.partial)
    submodules = upstream.keywords["submodules"] if is_partial else upstream.submodules
    submodules.linear_fc1 = DeterministicColumnParallelLinear
    submodules.linear_fc2 = DeterministicRowParallelLinear
    if is_partial:
        return functools.partial(DeterministicMLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=DeterministicMLP, submodules=submodules)


def get_deterministic_gpt_layer_spec(*_: Any, **__: Any) -> ModuleSpec:
    """A fresh spec of one transformer layer whose every module is deterministic.

    Arguments are accepted and ignored so that this stands in for any ``get_gpt_layer_*_spec``: which modules a model
    needs (q/k-norm or none) is read from its config when they are built.
    """
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = DeterministicRMSNorm
    layer.pre_mlp_layernorm = DeterministicRMSNorm
    layer.self_attn_bda = get_deterministic_bias_dropout_add
    layer.mlp_bda = get_deterministic_bias_dropout_add
    attention = layer.self_attention.submodules
    attention.linear_qkv = DeterministicColumnParallelLinear
    attention.core_attention = DeterministicCoreAttention
    attention.linear_proj = DeterministicRowParallelLinear
    attention.q_layernorm = DeterministicQKNorm
    attention.k_layernorm = DeterministicQKNorm
    layer.mlp = _deterministic_mlp(layer.mlp)
    return spec


deterministic_gpt_layer_spec = get_deterministic_gpt_layer_spec()


def get_deterministic_aiter_gpt_layer_spec(*_: Any, **__: Any) -> ModuleSpec:
    """The same with core attention on AITER's kernels, for AMD; other bits, and never in one run with the former."""
    spec = get_deterministic_gpt_layer_spec()
    spec.submodules.self_attention.submodules.core_attention = AiterCoreAttention
    return spec


deterministic_aiter_gpt_layer_spec = get_deterministic_aiter_gpt_layer_spec()
