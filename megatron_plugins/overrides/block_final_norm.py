"""The final norm of a transformer block.

It is not part of a layer spec: upstream puts a module global (TENorm, apex's or torch's norm) behind the layers.
torch's refuses sequence parallelism, apex's and TE's sum their weight gradient in an order of their own. When the
block's layers are ours, its final norm is too; any other spec passes through untouched.

Seam: ``_get_block_submodules`` is looked up as a global by ``TransformerBlock.__init__`` in every version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.block_final_norm",
    target="megatron.core.transformer.transformer_block:_get_block_submodules",
    modes=("invariant",),
    why="the final norm lies outside the layer spec and sums its weight gradient in a layout-dependent order",
    how="a block whose layers are deterministic gets a DeterministicRMSNorm behind them",
    retire_when="the final norm can be chosen through the layer spec",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_block_submodules(*args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        from megatron_plugins.modules.norm import DeterministicRMSNorm
        from megatron_plugins.modules.ownership_of_specs import is_deterministic_layer

        submodules = original(*args, **kwargs)
        layers = submodules.layer_specs or []
        if layers and all(is_deterministic_layer(spec) for spec in layers):
            return replace(submodules, layer_norm=DeterministicRMSNorm)
        return submodules

    return _get_block_submodules
