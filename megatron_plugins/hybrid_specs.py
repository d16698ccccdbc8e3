"""Stack specs of megatron-core's HybridModel (from 0.18) that select the deterministic modules.

``--spec megatron_plugins.hybrid_specs deterministic_hybrid_stack_spec``; callers that call take
`get_deterministic_hybrid_stack_spec`. Attention and MLP layers are covered (symbols ``*`` and ``-``), others are
refused by name while the model is built. Parameter names are those of upstream's own stack spec: norms inside the
linears behind them, ``decoder.final_norm``. As in the GPT specs there is a q/k-norm where the config asks for one,
which upstream's stack spec ignores.

Embedding, output layer, loss, RoPE and the gate: `megatron_plugins.overrides.hybrid_model`.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_plugins.modules.core_attention import DeterministicCoreAttention
from megatron_plugins.modules.hybrid_stack import DeterministicHybridStack
from megatron_plugins.modules.linear import (
    DeterministicLayerNormColumnParallelLinear,
    DeterministicRowParallelLinear,
)
from megatron_plugins.modules.mlp import DeterministicMLP
from megatron_plugins.modules.norm import DeterministicQKNorm
from megatron_plugins.modules.residual import get_deterministic_bias_dropout_add


def get_deterministic_hybrid_stack_spec(*_: Any, **__: Any) -> ModuleSpec:
    """A fresh spec of a HybridModel's stack whose every module is deterministic."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=DeterministicLayerNormColumnParallelLinear,
            core_attention=DeterministicCoreAttention,
            linear_proj=DeterministicRowParallelLinear,
            q_layernorm=DeterministicQKNorm,
            k_layernorm=DeterministicQKNorm,
        ),
    )
    mlp = functools.partial(
        DeterministicMLP.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=DeterministicLayerNormColumnParallelLinear, linear_fc2=DeterministicRowParallelLinear
        ),
    )
    return ModuleSpec(
        module=DeterministicHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    self_attention=attention, self_attn_bda=get_deterministic_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_deterministic_bias_dropout_add),
            ),
        ),
    )


deterministic_hybrid_stack_spec = get_deterministic_hybrid_stack_spec()
