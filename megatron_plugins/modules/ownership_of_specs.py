"""Telling our layer specs from others."""

from __future__ import annotations

from typing import Any

from megatron_plugins.modules.core_attention import DeterministicCoreAttention


def is_deterministic_layer(spec: Any) -> bool:
    """Whether a transformer layer's spec uses a deterministic core attention, the mark of our specs; AITER's is one."""
    attention = getattr(getattr(spec, "submodules", None), "self_attention", None)
    core = getattr(getattr(attention, "submodules", None), "core_attention", None)
    return isinstance(core, type) and issubclass(core, DeterministicCoreAttention)


def is_deterministic_block(block: Any) -> bool:
    """Whether every layer of a built TransformerBlock runs the deterministic core attention."""
    layers = list(getattr(block, "layers", []))
    return bool(layers) and all(
        isinstance(
            getattr(getattr(layer, "self_attention", None), "core_attention", None),
            DeterministicCoreAttention,
        )
        for layer in layers
    )
