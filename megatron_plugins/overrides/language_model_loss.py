"""The language-model loss: vocabulary-parallel cross entropy in eight canonical lanes.

Upstream sums exponentials per rank and all-reduces the sums: brackets follow TP, the library's order decides the
rest, and the fused variants compile both. The replacement computes the same loss from lane sums that do not depend
on TP. Models that are not deterministic keep upstream's.

Seam: ``LanguageModule.compute_language_model_loss``, a method that every GPTModel calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.language_model_loss",
    target="megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
    modes=("invariant",),
    why="the sum of exponentials over the vocabulary is bracketed by the tensor-parallel degree",
    how="eight lanes of the padded vocabulary, trees inside and over lanes, portable exp and log",
    retire_when="upstream's cross entropy has an order that does not depend on TP",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.kernels.cross_entropy.ops import vocab_parallel_cross_entropy

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        layout = getattr(getattr(self, "output_layer", None), "layout", None)
        if layout is None:
            return original(self, labels, logits, *args, **kwargs)
        by_position = labels.transpose(0, 1).contiguous()
        loss = vocab_parallel_cross_entropy(logits, by_position, layout.tp_group)
        return loss.transpose(0, 1).contiguous()

    return compute_language_model_loss
