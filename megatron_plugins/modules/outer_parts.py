"""Taking over the parts of a GPTModel that no layer spec reaches."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding

from megatron_plugins.modules.embedding import DeterministicVocabParallelEmbedding
from megatron_plugins.modules.linear import DeterministicColumnParallelLinear
from megatron_plugins.parallel_layout import layout_of
from patches.errors import NotCoveredError
from te_overrides.kernels.cross_entropy.reference import check_vocabulary

_POSITIONS = ("rope", "none")


def take_over_outer_parts(model: Any) -> None:
    """Give a built GPTModel deterministic embedding and output layer classes, in place.

    Raises:
        NotCoveredError: tied embeddings, learned positions, multi-token prediction, unknown classes.
        VocabularyError: a padded vocabulary whose lanes would depend on TP.
    """
    if model.share_embeddings_and_output_weights:
        raise NotCoveredError(
            "share_embeddings_and_output_weights=True: the two gradients of a tied weight are owned by different "
            "ranks and would be added before or after rounding depending on CP. Pass "
            "--untie-embeddings-and-output-weights."
        )
    if model.position_embedding_type not in _POSITIONS:
        raise NotCoveredError(
            f"position_embedding_type={model.position_embedding_type!r}: the contract covers {_POSITIONS}. "
            "Pass --position-embedding-type rope."
        )
    if getattr(model, "mtp_process", False):
        raise NotCoveredError(
            "multi-token prediction is on: its block is not part of the contract yet; switch it off."
        )
    check_vocabulary(model.vocab_size)
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        _retype(embedding.word_embeddings, VocabParallelEmbedding, DeterministicVocabParallelEmbedding)
        embedding.word_embeddings.layout = layout_of(model.config, embedding.word_embeddings.tp_group)
    if model.post_process:
        _retype(model.output_layer, ColumnParallelLinear, DeterministicColumnParallelLinear)
        model.output_layer.adopt()


def _retype(module: Any, expected: type, replacement: type) -> None:
    """Change the class of `module` from exactly `expected` to its subclass `replacement`."""
    if type(module) is not expected:
        raise NotCoveredError(
            f"expected a {expected.__module__}.{expected.__name__} to take over, found {type(module).__module__}."
            f"{type(module).__name__}: somebody else replaced it. Remove that replacement or run without "
            "--deterministic-rocm."
        )
    module.__class__ = replacement
