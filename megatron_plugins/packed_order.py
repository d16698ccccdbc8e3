"""How the tokens of a packed batch lie over context-parallel ranks, told to every module that sums over tokens.

Of packed sequences (``PackedSeqParams``, thd) every rank holds its chunks of each sequence. A sum over tokens needs
them in canonical order, and upstream tells the boundaries to attention alone. So a model and each of its layers keep
them for the time of their forward pass (hooks), and a module asks `of_batch` for its layout when it is called; autograd
functions save what it says. Layers keep them as well because recomputation calls a layer again in backward, when no
model is running, and on another thread.

With one context-parallel rank the rows lie in canonical order, and nobody asks.

What this cannot reach is refused by name where a pack enters a model: parts of a layer that are computed again without
their layer, an embedding that somebody called beside the model, captured layers. Who checkpoints a part by itself, or
calls a module beside its model, is refused where the module asks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatron_plugins.call_arguments import call_arguments
from megatron_plugins.modules.captured_layers import layers_are_captured
from megatron_plugins.parallel_layout import ParallelLayout
from patches.errors import NotCoveredError
from te_overrides.kernels.zigzag.reference import check_packed_rows

Boundaries = tuple[int, ...]
_RECOMPUTED_WITH_ITS_OPERANDS = {"core_attn"}
"""Parts that selective recomputation calls again with the boundaries among their arguments."""


class _Running(threading.local):
    """Modules that are running in this thread, innermost last: each with its batch's boundaries, and whether gradients
    were being recorded when it was entered."""

    def __init__(self) -> None:
        self.scopes: list[tuple[Any, Boundaries | None, bool]] = []


_running = _Running()
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
_trained_on_packs = False
"""Whether a model has met a pack whose gradients are wanted: from then on, a module that nobody tells is refused."""


def read(cu_seqlens: Any) -> Boundaries:
    """Boundaries on the host, read from the device once a tensor and model call: every layer asks for the same."""
    if not isinstance(cu_seqlens, torch.Tensor):
        return tuple(int(x) for x in cu_seqlens)
    if cu_seqlens.is_inference():
        return tuple(cu_seqlens.tolist())
    known: tuple[int, Boundaries] | None = _read.get(cu_seqlens)
    if known is None or known[0] != cu_seqlens._version:
        known = _read[cu_seqlens] = cu_seqlens._version, tuple(cu_seqlens.tolist())
    return known[1]


def of_batch(layout: ParallelLayout) -> ParallelLayout:
    """The layout of the batch that is passing through: `layout` with the boundaries of packed sequences, if any.

    Raises:
        NotCoveredError: gradients of a module that may stand before a pack without knowing it.
    """
    if layout.cp_size == 1:
        return layout
    if not _running.scopes:
        if _trained_on_packs and torch.is_grad_enabled():
            raise NotCoveredError(
                f"a deterministic module ran outside its model at context_parallel_size={layout.cp_size}, after packed "
                "sequences were trained on: where they begin is not known here, and its gradients would be sums in "
                "another order. Call the model, not its parts; recompute whole layers (--recompute-granularity full) "
                "or core_attn alone, and put no torch.utils.checkpoint around a part of a layer."
            )
        return layout
    _module, bounds, recorded = _running.scopes[-1]
    if bounds is None:
        return layout
    if recorded and not torch.is_grad_enabled():
        raise NotCoveredError(
            f"a part of a layer is checkpointed by itself, with {_in_words(bounds)} at context_parallel_size="
            f"{layout.cp_size}: computed again in backward, it would not know where they begin. Recompute whole layers "
            "(--recompute-granularity full) or core_attn alone."
        )
    return replace(layout, cu_seqlens=bounds)


def tell_packed_order(model: Any) -> None:
    """Make a built GPTModel or HybridModel of deterministic layers keep the boundaries of its batches."""

    def enter_model(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        global _trained_on_packs
        # A buffer may have been filled again in ways that its version does not tell.
        _read.clear()
        given = call_arguments(module, args, kwargs)
        packed = given.get("packed_seq_params")
        bounds = None if packed is None else boundaries(packed)
        if bounds is not None:
            if model.config.context_parallel_size > 1:
                _require_reachable(model, given)
                if isinstance(ids := given.get("input_ids"), torch.Tensor):
                    _require_fit(bounds, ids.shape[0], ids.shape[1], _layout_in(model))
                _trained_on_packs |= torch.is_grad_enabled()
            if getattr(model, "position_embedding_type", "rope") == "rope":
                _require_angles(packed, bounds)
        _running.scopes.append((module, bounds, torch.is_grad_enabled()))

    def enter_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        packed = kwargs.get("packed_seq_params")
        bounds = None if packed is None else boundaries(packed)
        around = _running.scopes[-1][1] if _running.scopes else None
        # Inside backward a layer is computed again, and the model is not running.
        again = torch._C._current_graph_task_id() != -1
        if bounds != around and not again:
            raise NotCoveredError(
                f"a layer was called with {_in_words(bounds)}, the model around it with {_in_words(around)}: sums over "
                "tokens outside the layer would be in another order. Call the model, not its decoder, and pass "
                "packed_seq_params to it."
            )
        if bounds is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            layout = _layout_in(module)
            rows = hidden.shape[0] * (layout.tp_size if layout.sequence_parallel else 1)
            _require_fit(bounds, hidden.shape[1], rows, layout)
        _running.scopes.append((module, bounds, torch.is_grad_enabled()))

    def leave(module: Any, *_: Any) -> None:
        # Called as well where entering was refused: then there is nothing to leave.
        if _running.scopes and _running.scopes[-1][0] is module:
            _running.scopes.pop()

    model.register_forward_pre_hook(enter_model, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)
    if model.config.context_parallel_size == 1:
        return
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(enter_layer, with_kwargs=True)
        layer.register_forward_hook(leave, always_call=True)


def _layout_in(module: Any) -> ParallelLayout:
    """What the deterministic modules in `module` go by."""
    said = (getattr(inner, "layout", None) for inner in module.modules())
    return next(layout for layout in said if isinstance(layout, ParallelLayout))


def boundaries(packed: Any) -> Boundaries:
    """Boundaries of the rows that a pack's sequences take, padding included.

    Raises:
        NotCoveredError: another format than thd, a group of the batch's own, other boundaries for keys.
    """
    if packed.qkv_format != "thd":
        raise NotCoveredError(
            f"packed_seq_params.qkv_format={packed.qkv_format!r}: packed sequences are laid out as 'thd'."
        )
    own = {name: getattr(packed, name, None) for name in ("cp_group", "local_cp_size")}
    if any(value is not None for value in own.values()):
        found = ", ".join(f"{name}={value!r}" for name, value in own.items() if value is not None)
        raise NotCoveredError(
            f"packed_seq_params carries {found}: a batch with context-parallel ranks of its own lies in another order "
            "than the model's layout tells. Leave them out; every pack is cut over the model's context-parallel group."
        )
    bounds = []
    for side in ("q", "kv"):
        padded = getattr(packed, f"cu_seqlens_{side}_padded", None)
        bounds.append(read(getattr(packed, f"cu_seqlens_{side}") if padded is None else padded))
    if bounds[0] != bounds[1]:
        raise NotCoveredError(
            f"queries are {_in_words(bounds[0])}, keys {_in_words(bounds[1])}: self-attention has one set "
            "of boundaries; pass the same cu_seqlens (and padded ones) for both."
        )
    return bounds[0]


def _in_words(bounds: Boundaries | None) -> str:
    if bounds is None:
        return "no packed sequences"
    shown = ", ".join(map(str, bounds[:6])) + (", …" if len(bounds) > 6 else "")
    return f"{len(bounds) - 1} packed sequences at [{shown}]"


def _require_angles(packed: Any, bounds: Boundaries) -> None:
    """Raise unless upstream's RoPE will count positions from every sequence's own start.

    It makes angles for `max_seqlen` positions, and takes as many of them as there are rows in all for angles of the
    whole pack, in which a token's place follows its neighbours (rope_utils._apply_rotary_pos_emb_thd).

    Raises:
        NotCoveredError: a `max_seqlen` below the longest sequence, or one of the whole pack.
    """
    said = [getattr(packed, f"max_seqlen_{side}", None) for side in ("q", "kv")]
    if not (given := [int(value) for value in said if value is not None]):
        return
    most = max(given)
    lengths = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]
    longest = max(lengths, default=0)
    if most < longest:
        raise NotCoveredError(
            f"packed_seq_params.max_seqlen={most} with a sequence of {longest} rows, padding included: RoPE has no "
            "angles for the rest. Pass the longest padded length."
        )
    if most == bounds[-1] and len(lengths) > 1:
        raise NotCoveredError(
            f"packed_seq_params.max_seqlen={most} is the length of the whole pack of {len(lengths)} sequences: "
            "upstream's RoPE then counts positions through the pack, and a sequence's bits follow its neighbours. Pass "
            f"the longest padded length, {longest}."
        )


def _require_fit(bounds: Boundaries, batch: int, rows: int, layout: ParallelLayout) -> None:
    """Raise LayoutError or NotCoveredError unless a rank's rows are what the boundaries tell."""
    if batch != 1:
        raise NotCoveredError(
            f"packed sequences in {batch} batch rows: sequences of a pack lie on one token axis, [1, t]."
        )
    check_packed_rows(bounds, rows, layout.cp_size, layout.cp_layout)


def _require_reachable(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse a packed batch where something would sum over its tokens without its boundaries."""
    config = model.config
    apart = set(getattr(config, "recompute_modules", None) or ()) - _RECOMPUTED_WITH_ITS_OPERANDS
    found = None
    if config.recompute_granularity == "selective" and apart and torch.is_grad_enabled():
        found = (
            f"recompute_modules={sorted(apart)}: they are computed again without their layer, which holds the "
            "boundaries. Recompute whole layers (--recompute-granularity full) or core_attn alone."
        )
    elif given.get("decoder_input") is not None:
        found = (
            "decoder_input: whoever made it did not know the boundaries, and gradients of its parameters would be in "
            "another order. Pass input_ids and let the model embed them."
        )
    elif layers_are_captured(model.decoder):
        found = "layers captured in CUDA graphs: the boundaries are not among what a graph reads. Run them uncaptured."
    if found:
        raise NotCoveredError(
            f"packed sequences at context_parallel_size={config.context_parallel_size} with {found}"
        )
