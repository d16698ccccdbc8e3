"""Layer specs that select the deterministic modules.

``--spec megatron_plugins.layer_specs NAME`` takes a ModuleSpec object: Megatron returns the attribute without calling
it. Callers that call (Megatron-Bridge, mbridge, verl providers) take the functions, which ignore the arguments that
upstream's spec functions take: what a model needs (q/k-norm or none) is read from its config when it is built.

Whole specs, for mode invariant (`WHOLE`):

=============================================  =========================================================================
deterministic_gpt_layer_spec                   parameter names of Megatron's local spec
deterministic_gpt_layer_spec_with_te_names     those of TransformerEngine's spec: norms inside the linears behind them,
                                               as frameworks that map names from Hugging Face expect
deterministic_gpt_layer_spec_two_lane          the first, with dX of gate and up reduced separately (other bits)
deterministic_aiter_gpt_layer_spec             the first, with core attention on AITER's kernels (other bits)
=============================================  =========================================================================

Specs of upstream's with one deterministic part, for mode stable: `local_layer_with_deterministic_ffn`, `…_linears`,
`…_core_attention`, `…_norms`, and `te_layer_with_deterministic_…` where TransformerEngine is installed; as a function,
`get_gpt_layer_spec_with`.

Parts of a GPT model outside the layer spec (embedding, final norm, output layer, loss, RoPE) are taken over when a
GPTModel is built with a whole spec: see `megatron_plugins.overrides`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import gpt_layer_specs as upstream
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_plugins.arguments import WHOLE
from megatron_plugins.modules.aiter_core_attention import AiterCoreAttention
from megatron_plugins.modules.core_attention import DeterministicCoreAttention
from megatron_plugins.modules.linear import (
    DeterministicColumnParallelLinear,
    DeterministicLayerNormColumnParallelLinear,
    DeterministicRowParallelLinear,
)
from megatron_plugins.modules.mlp import DeterministicMLP, TwoLaneMLP
from megatron_plugins.modules.norm import DeterministicQKNorm, DeterministicRMSNorm
from megatron_plugins.modules.residual import get_deterministic_bias_dropout_add
from megatron_plugins.parts import (
    PARTS,
    deterministic_mlp,
    mlp_submodules,
    norm_if_configured,
    with_deterministic,
)
from patches.errors import NotCoveredError


def _whole_layer(mlp: type[DeterministicMLP] = DeterministicMLP) -> ModuleSpec:
    spec = upstream.get_gpt_layer_local_spec(normalization="RMSNorm")
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
    layer.mlp = deterministic_mlp(layer.mlp, mlp)
    return spec


def get_deterministic_gpt_layer_spec(*_: Any, **__: Any) -> ModuleSpec:
    """A fresh spec of one transformer layer whose every module is deterministic; names of Megatron's local spec."""
    return _whole_layer()


def get_deterministic_gpt_layer_spec_two_lane(*_: Any, **__: Any) -> ModuleSpec:
    """`get_deterministic_gpt_layer_spec` with the MLP's input gradient reduced for gate and up separately."""
    return _whole_layer(TwoLaneMLP)


def get_deterministic_gpt_layer_spec_with_te_names(*_: Any, **__: Any) -> ModuleSpec:
    """The same layer, the same bits, with the parameter names of TransformerEngine's spec.

    ``self_attention.linear_qkv.layer_norm_weight`` and ``mlp.linear_fc1.layer_norm_weight`` instead of norms of their
    own: what Megatron-Bridge, mbridge and verl map from and to Hugging Face.
    """
    spec = _whole_layer()
    layer = spec.submodules
    layer.input_layernorm = IdentityOp
    layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = DeterministicLayerNormColumnParallelLinear
    mlp_submodules(layer.mlp).linear_fc1 = DeterministicLayerNormColumnParallelLinear
    # The map that gives the local spec's norms these names in a distributed checkpoint.
    layer.sharded_state_dict_keys_map = {}
    return spec


def get_deterministic_aiter_gpt_layer_spec(*_: Any, **__: Any) -> ModuleSpec:
    """The same with core attention on AITER's kernels, for AMD; other bits, and never in one run with the former."""
    spec = get_deterministic_gpt_layer_spec()
    spec.submodules.self_attention.submodules.core_attention = AiterCoreAttention
    return spec


def get_deterministic_gpt_decoder_block_spec(
    config: Any, *_: Any, vp_stage: int | None = None, **__: Any
) -> TransformerBlockSubmodules:
    """The decoder of one pipeline stage, for callers of ``get_gpt_decoder_block_spec`` (mbridge, verl).

    Args:
        config: Megatron's TransformerConfig.
        vp_stage: virtual pipeline stage, if any.
    """
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [get_deterministic_gpt_layer_spec_with_te_names() for _ in range(count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=DeterministicRMSNorm)


def get_gpt_layer_spec_with(*parts: str, base: str = "local", **upstream_arguments: Any) -> ModuleSpec:
    """Upstream's spec of one layer with deterministic `parts`, for mode stable.

    Args:
        parts: of `megatron_plugins.parts.PARTS`.
        base: "local", or "te" for TransformerEngine's.
        upstream_arguments: for upstream's spec function, ``qk_layernorm`` and so on.

    Raises:
        NotCoveredError: an unknown part or base, norms inside linears that are to stay, TransformerEngine missing.
    """
    if base == "te":
        if not upstream.HAVE_TE:
            raise NotCoveredError(
                "base='te' was asked for, but TransformerEngine is not installed; use base='local'."
            )
        spec = upstream.get_gpt_layer_with_transformer_engine_spec(**upstream_arguments)
    elif base == "local":
        spec = upstream.get_gpt_layer_local_spec(**({"normalization": "RMSNorm"} | upstream_arguments))
    else:
        raise NotCoveredError(f"base={base!r}: there are 'local' and 'te'.")
    return with_deterministic(spec, *parts)


def _for_any_config(part: str, base: str) -> ModuleSpec:
    """A spec object that exists before the config: its q/k-norms are there where the config asks for them."""
    spec = get_gpt_layer_spec_with(part, base=base, qk_layernorm=True)
    attention = spec.submodules.self_attention.submodules
    if part != "norms":
        attention.q_layernorm = norm_if_configured(attention.q_layernorm)
        attention.k_layernorm = norm_if_configured(attention.k_layernorm)
    return spec


deterministic_gpt_layer_spec = get_deterministic_gpt_layer_spec()
deterministic_gpt_layer_spec_two_lane = get_deterministic_gpt_layer_spec_two_lane()
deterministic_gpt_layer_spec_with_te_names = get_deterministic_gpt_layer_spec_with_te_names()
deterministic_aiter_gpt_layer_spec = get_deterministic_aiter_gpt_layer_spec()
assert set(WHOLE) <= globals().keys()

for _part in PARTS:
    globals()[f"local_layer_with_deterministic_{_part}"] = _for_any_config(_part, "local")
    # Norms of TransformerEngine's spec are inside its linears.
    if upstream.HAVE_TE and _part != "norms":
        globals()[f"te_layer_with_deterministic_{_part}"] = _for_any_config(_part, "te")
