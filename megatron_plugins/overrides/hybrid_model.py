"""Embedding, output layer and gate of a HybridModel, as of a GPTModel (`gpt_model.py`).

megatron-core has HybridModel from 0.18 on and deprecates GPTModel in 0.19. It is a sibling of GPTModel, so the override
of the one constructor does not see the other. A pattern with layers outside the contract is refused before anything is
built, on every pipeline stage alike.

Seam: ``HybridModel.__init__``; the deprecated ``MambaModel`` of the same releases calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.hybrid_model.outer_parts",
    target="megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    modes=("stable", "invariant"),
    why="embedding and output layer lie outside the stack spec and reduce in an order that depends on the layout",
    how="in mode invariant a model of deterministic layers gets deterministic embedding and output layer classes",
    retire_when="embedding and output layer can be chosen through a spec",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.18",
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    import inspect

    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_plugins.modules.built_model import finish
        from megatron_plugins.modules.hybrid_stack import DeterministicHybridStack, require_covered_pattern

        given = signature.bind(self, *args, **kwargs).arguments
        ours = getattr(given["hybrid_stack_spec"], "module", None) is DeterministicHybridStack
        pattern = given.get("hybrid_layer_pattern") or given.get("hybrid_override_pattern")
        if ours and pattern:
            require_covered_pattern(pattern)
        original(self, *args, **kwargs)
        finish(self, deterministic=ours)

    return __init__
