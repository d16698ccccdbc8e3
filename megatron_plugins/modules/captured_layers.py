"""Are the layers of a model captured as CUDA graphs of their own? Then Python around them does not run again."""

from __future__ import annotations

from typing import Any


def layers_are_captured(block: Any) -> bool:
    """Whether a TransformerBlock (or HybridStack) replays its layers, by what upstream's versions leave on them."""
    config = block.config
    return (
        any(hasattr(layer, "cudagraph_manager") for layer in block.layers)
        or bool(getattr(config, "external_cuda_graph", False))
        or getattr(config, "cuda_graph_impl", None) == "transformer_engine"
    )
