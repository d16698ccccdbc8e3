"""Residual adds of a built model and the norms behind them, joined: one pass over the residual stream instead of two.

Which norm follows an add is known when the model stands: in a layer the norm before the MLP; after the MLP the next
layer's first norm, or the final norm. Norms inside linears (TransformerEngine's names) count as well. Only the add's
entry of a layer is replaced, so layers, norms, parameters and checkpoints stay what they are.

Left alone are adds whose sum reaches the norm as another tensor, so that the norm would be computed twice: where layers
are recomputed one by one (no norm of the next layer), where the norm or the MLP that holds it is recomputed, where the
norm's input is offloaded, and where layers are captured as CUDA graphs of their own. At the end of a pipeline stage no
norm follows.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

from megatron.core.transformer.identity_op import IdentityOp

from megatron_plugins.modules.captured_layers import layers_are_captured
from megatron_plugins.modules.residual import AddBeforeNorm, get_deterministic_bias_dropout_add


class _Part(NamedTuple):
    """Half of a layer: a norm, what it feeds, and the add behind it."""

    layer: Any
    norm: Any
    add: str


def _norm(*modules: Any) -> Any:
    return next((module for module in modules if hasattr(module, "norm_terms")), None)


def _parts(layer: Any) -> list[_Part]:
    parts = []
    if not isinstance(layer.self_attention, IdentityOp):
        again = getattr(layer, "recompute_input_layernorm", False) or getattr(
            layer, "offload_attn_norm", False
        )
        norm = _norm(layer.input_layernorm, getattr(layer.self_attention, "linear_qkv", None))
        parts.append(_Part(layer, None if again else norm, "self_attn_bda"))
    if not isinstance(layer.mlp, IdentityOp):
        again = getattr(layer, "recompute_pre_mlp_layernorm", False) or getattr(
            layer, "offload_mlp_norm", False
        )
        norm = _norm(layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None))
        again = again or (getattr(layer, "recompute_mlp", False) and norm is not layer.pre_mlp_layernorm)
        parts.append(_Part(layer, None if again else norm, "mlp_bda"))
    return parts


def join_adds_with_norms(block: Any) -> int:
    """Make residual adds of deterministic layers compute the norm behind them as well.

    Args:
        block: a TransformerBlock (or HybridStack) whose layers are deterministic.

    Returns:
        how many adds were joined.
    """
    if layers_are_captured(block):
        return 0
    parts = [part for layer in block.layers for part in _parts(layer)]
    final = _norm(getattr(block, "final_layernorm", None), getattr(block, "final_norm", None))
    followers = [*parts[1:], _Part(None, final, "")]
    whole_layers_again = block.config.recompute_granularity == "full"
    joined = 0
    for part, follower in zip(parts, followers, strict=True):
        apart = whole_layers_again and follower.layer is not part.layer
        ours = getattr(part.layer, part.add) is get_deterministic_bias_dropout_add
        if follower.norm is None or apart or not ours:
            continue
        setattr(part.layer, part.add, AddBeforeNorm(follower.norm))
        # Upstream enables gradients for the add even where the caller disabled them. A norm's weight asks for them,
        # so inference and the first pass of recomputation would record a graph.
        part.layer.bias_dropout_add_exec_handler = nullcontext
        joined += 1
    return joined


def separate_adds_from_norms(block: Any) -> None:
    """Undo `join_adds_with_norms`: the same bits in two passes, each of which can be timed."""
    for layer in block.layers:
        for name in ("self_attn_bda", "mlp_bda"):
            if isinstance(getattr(layer, name), AddBeforeNorm):
                setattr(layer, name, get_deterministic_bias_dropout_add)
