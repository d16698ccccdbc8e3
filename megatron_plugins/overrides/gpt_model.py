"""Embedding and output layer of a GPTModel.

Both lie outside the layer spec. Upstream's embedding accumulates its gradient by atomics, its output layer's input
gradient is an all-reduce in the library's order. A GPTModel built from our spec has them taken over when its own
constructor has finished: our classes subclass upstream's and add no parameters, so changing the class of the built
module keeps its weights, hooks, names and checkpoints. A GPTModel with any other spec keeps its modules.

The gate hangs here too (megatron_plugins/gate.py): every way to a model goes through its constructor.

Seam: ``GPTModel.__init__``; the classes themselves are looked up in a package that upstream's own specs use as well, so
replacing those would change models that are not ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.gpt_model.outer_parts",
    target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
    modes=("stable", "invariant"),
    why="embedding and output layer lie outside the layer spec and reduce in an order that depends on the layout",
    how="in mode invariant a model of deterministic layers gets deterministic embedding and output layer classes",
    retire_when="embedding and output layer can be chosen through a spec",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from megatron_plugins.modules.built_model import finish
        from megatron_plugins.modules.ownership_of_specs import is_deterministic_block

        finish(self, deterministic=is_deterministic_block(self.decoder))

    return __init__
