"""Deterministic parts in a layer spec of upstream's: each capability selectable on its own.

For mode stable, where a job wants one part and keeps the rest of its stack. In mode invariant the whole is promised:
there the gate names what is missing. A part takes the place of upstream's module under the same parameter names, also
where TransformerEngine fuses a norm into the linear behind it, so checkpoints stay interchangeable.

Sums over ranks are no part: they belong to no module of a spec, but to functions of upstream's that mode invariant
replaces (`megatron_plugins.overrides`).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_plugins.modules.core_attention import DeterministicCoreAttention
from megatron_plugins.modules.linear import (
    DeterministicColumnParallelLinear,
    DeterministicLayerNormColumnParallelLinear,
    DeterministicRowParallelLinear,
)
from megatron_plugins.modules.mlp import DeterministicMLP
from megatron_plugins.modules.norm import DeterministicQKNorm, DeterministicRMSNorm
from patches.errors import NotCoveredError

PARTS = {
    "ffn": "the MLP: both projections, the activation, and a norm that is fused into the first",
    "linears": "QKV, attention output and both projections of the MLP, and norms that are fused into them",
    "core_attention": "core attention",
    "norms": "input, pre-MLP, q and k norm, where they are modules of their own",
}


def _name(module: Any) -> str:
    module = module.module if isinstance(module, ModuleSpec) else module
    module = module.func if isinstance(module, functools.partial) else module
    return str(getattr(module, "__name__", module))


def _has_norm(linear: Any) -> bool:
    return "LayerNorm" in _name(linear)


def _column(linear: Any) -> type:
    """Ours for upstream's column-parallel linear, with a norm in it where upstream's has one."""
    return (
        DeterministicLayerNormColumnParallelLinear if _has_norm(linear) else DeterministicColumnParallelLinear
    )


def mlp_submodules(mlp: Any) -> Any:
    """Submodules of an MLP's entry: a ModuleSpec up to megatron-core 0.17, a functools.partial from 0.18."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def deterministic_mlp(mlp: Any, module: type[DeterministicMLP] = DeterministicMLP) -> Any:
    """The MLP entry with our classes, in the form that it came in."""
    submodules = mlp_submodules(mlp)
    submodules.linear_fc1 = _column(submodules.linear_fc1)
    submodules.linear_fc2 = DeterministicRowParallelLinear
    if isinstance(mlp, functools.partial):
        return functools.partial(module.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=module, submodules=submodules)


def with_deterministic(spec: ModuleSpec, *parts: str) -> ModuleSpec:
    """A copy of a GPT layer's spec in which `parts` are deterministic and everything else is what it was.

    Args:
        spec: of a TransformerLayer with SelfAttention and a dense MLP, local or TransformerEngine's.
        parts: of `PARTS`.

    Raises:
        NotCoveredError: an unknown part, none, or norms that only exist inside linears which are to stay.
    """
    unknown = sorted(set(parts) - PARTS.keys())
    if unknown or not parts:
        raise NotCoveredError(
            f"deterministic parts {unknown or '(none)'} were asked for; there are {', '.join(PARTS)}. Name some "
            "of those."
        )
    spec = copy.deepcopy(spec)
    layer = spec.submodules
    attention = layer.self_attention.submodules
    if "norms" in parts:
        _replace_norms(layer, attention, "linears" in parts or "ffn" in parts)
    if "linears" in parts:
        submodules = mlp_submodules(layer.mlp)
        submodules.linear_fc1 = _column(submodules.linear_fc1)
        submodules.linear_fc2 = DeterministicRowParallelLinear
        attention.linear_qkv = _column(attention.linear_qkv)
        attention.linear_proj = DeterministicRowParallelLinear
    if "ffn" in parts:
        layer.mlp = deterministic_mlp(layer.mlp)
    if "core_attention" in parts:
        attention.core_attention = DeterministicCoreAttention
    return spec


def _is_identity(module: Any) -> bool:
    return module is None or module is IdentityOp


def _replace_norms(layer: Any, attention: Any, linears_too: bool) -> None:
    fused = [
        _name(linear)
        for linear in (attention.linear_qkv, mlp_submodules(layer.mlp).linear_fc1)
        if _has_norm(linear)
    ]
    if fused and not linears_too:
        raise NotCoveredError(
            f"norms are fused into {', '.join(fused)}: they cannot become deterministic while those linears stay. Ask "
            "for 'linears' as well, or start from a spec whose norms are modules of their own."
        )
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if not _is_identity(getattr(layer, name)):
            setattr(layer, name, DeterministicRMSNorm)
    for name in ("q_layernorm", "k_layernorm"):
        if not _is_identity(getattr(attention, name)):
            setattr(attention, name, DeterministicQKNorm)


def norm_if_configured(norm: Any) -> Any:
    """A q/k-norm for spec objects that exist before the config: `norm` where it asks for one, else an identity."""

    class QKNormIfConfigured:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            from megatron.core.transformer.spec_utils import build_module

            if not config.qk_layernorm:
                return IdentityOp()
            return build_module(norm, config=config, hidden_size=hidden_size, eps=eps, **kwargs)

    return QKNormIfConfigured
