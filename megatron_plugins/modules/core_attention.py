"""Core attention of the layer spec: a query row's bits depend on its position alone (docs/numbers.md, "Attention").

The same code serves every CP degree, one included: TransformerEngine calls its context-parallel runtime only for more
than one rank, so an override of the runtime alone would leave CP=1 with other arithmetic.

Inference with static batching hands over all cached keys and the last queries; with dynamic batching
`megatron_plugins/overrides/paged_inference.py` asks `forward_paged`. Both are rows of one attention, so decode has the
bits of prefill and of training.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_plugins.modules.guard import require_supported
from megatron_plugins.packed_order import read
from megatron_plugins.parallel_layout import layout_of
from patches.errors import NotCoveredError
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from te_overrides.kernels.attention.paged import last_rows, paged_attention
from te_overrides.kernels.eager import eager_only

_CAUSAL = {"causal": True, "padding_causal": True, "no_mask": False}


def _window_of_layer(config: Any, layer_number: int) -> tuple[int, int] | None:
    """The sliding window of a layer, counted from 1; upstream gives some layers none (`window_attn_skip_freq`)."""
    window = getattr(config, "window_size", None)
    if window is not None and getattr(config, "window_attn_skip_freq", None) is not None:
        # Function and field came together (0.15): which layers it means is upstream's to say.
        from megatron.core.transformer.utils import is_layer_window_attention

        if not is_layer_window_attention(window, config.window_attn_skip_freq, layer_number):
            return None
    return tuple(window) if window is not None else None


def look_once_a_model(decoder: torch.nn.Module) -> None:
    """Let the first attention of these layers, on any pipeline stage, alone look at the block tables they share."""
    cores = [module for module in decoder.modules() if isinstance(module, DeterministicCoreAttention)]
    for index, core in enumerate(cores):
        core.looks_at_tables = index == 0


class DeterministicCoreAttention(torch.nn.Module):
    """Megatron's core-attention interface on the strict attention kernels.

    Raises:
        NotCoveredError: cross attention, dropout, softmax variants, attention bias.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        require_supported(config)
        softmax_type = getattr(config, "softmax_type", "vanilla")
        for found, wanted, name in (
            (attention_type, "self", "attention_type"),
            (attention_dropout or 0.0, 0.0, "attention_dropout"),
            (softmax_type, "vanilla", "softmax_type"),
        ):
            if found != wanted:
                raise NotCoveredError(
                    f"{name}={found!r} in layer {layer_number}: the attention contract covers {wanted!r} alone."
                )
        groups = pg_collection if pg_collection is not None else model_comm_pgs
        self.config, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.layout = layout_of(config, getattr(groups, "tp", None), getattr(groups, "cp", None))
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        if getattr(config, "apply_query_key_layer_scaling", False):
            raise NotCoveredError(
                "apply_query_key_layer_scaling=True: the scale would depend on the layer; switch it off."
            )
        self.window = _window_of_layer(config, layer_number)
        # Looking at a block table waits for the device, and the layers of a model share it (`look_once_a_model`).
        self.looks_at_tables = True

    @eager_only
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """query [s, B, heads, d], key/value [s, B, groups, d], all local -> [s, B, heads * d].

        `attention_mask` is what Megatron passes beside the mask type; the type decides. A model whose mask says
        something else is stopped at its first forward (`megatron_plugins/batches.py`).

        Raises:
            NotCoveredError: another kind of mask, a padding mask on a batch that is not packed, an attention bias.
        """
        kind = (attn_mask_type or self.attn_mask_type).name
        if kind not in _CAUSAL:
            raise NotCoveredError(f"attn_mask_type={kind}: the attention contract covers {sorted(_CAUSAL)}.")
        if attention_bias is not None:
            raise NotCoveredError("attention_bias was passed: biases are not part of the attention contract.")
        if kind == "padding_causal" and packed_seq_params is None and attention_mask is not None:
            raise NotCoveredError(
                "attn_mask_type=padding_causal with an attention mask on a batch that is not packed: padding is known "
                "to the contract as boundaries alone. Pack the sequences (packed_seq_params with padded boundaries), "
                "or put padding behind the tokens and take the causal mask."
            )
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, _CAUSAL[kind])
        if query.shape[0] != key.shape[0]:
            return self._static_inference(query, key, value, _CAUSAL[kind])
        return self._attend(query, key, value, _CAUSAL[kind]).flatten(2)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        """[s, B, heads, d] of a batch whose rows the context-parallel group shares."""
        return context_parallel_attention(
            query,
            key,
            value,
            cp_group=self.layout.cp_group,
            layout=self.layout.cp_layout,
            causal=causal,
            softmax_scale=self.softmax_scale,
            window=self.window,
        )[0]

    def _static_inference(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        """The last queries of sequences over all their keys: decode, or a chunk of prefill."""
        # Upstream says that one query sees every key instead of saying causal.
        if refusal := self.paged_kv_refusal(causal or query.shape[0] == 1):
            raise NotCoveredError(f"{query.shape[0]} queries over {key.shape[0]} keys: {refusal}.")
        return last_rows(query, key, value, softmax_scale=self.softmax_scale, window=self.window).flatten(2)

    def paged_kv_refusal(self, causal: bool | None = None) -> str | None:
        """Why this module does not attend over a cache, in words; None if it does.

        What `supports_paged_kv` declares and what `forward_paged` does are both this answer.
        """
        if self.layout.cp_size > 1:
            return (
                f"a cache is read at context_parallel_size=1, this model has {self.layout.cp_size}; run inference "
                "without context parallelism"
            )
        if not (_CAUSAL.get(self.attn_mask_type.name, False) if causal is None else causal):
            return f"a cache is read with a causal mask, this layer has {self.attn_mask_type.name}"
        return None

    @property
    def supports_paged_kv(self) -> bool:
        """Whether `forward_paged` serves this module."""
        return self.paged_kv_refusal() is None

    @eager_only
    def forward_paged(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        seqused_k: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the last tokens of each request over its pages, read where they lie; the bits of prefill.

        Args:
            query: [t, 1, heads, d], tokens of all requests one behind the other.
            key_cache, value_cache: [pages, page_size, groups, d].
            block_table: integer [requests, max_pages].
            seqused_k: integer [requests], keys of each request, those of its new tokens included.
            cu_seqlens_q: integer [requests + 1], where each request's tokens start; None if all have equally many. It
                is read on the host.

        Returns:
            Like `query`.

        Raises:
            NotCoveredError: what `paged_kv_refusal` names.
            AttentionError: a table that does not hold the requests.
        """
        if refusal := self.paged_kv_refusal():
            raise NotCoveredError(f"attention over a paged cache in layer {self.layer_number}: {refusal}.")
        options: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "window": self.window,
            "validate": self.looks_at_tables,
        }
        requests, tokens = seqused_k.shape[0], query.squeeze(1)
        if cu_seqlens_q is None:
            by_request = tokens.unflatten(0, (requests, -1))
            out, _lse = paged_attention(
                by_request,
                key_cache,
                value_cache,
                block_table=block_table[:requests],
                seq_lens=seqused_k,
                **options,
            )
            return out.reshape(query.shape)
        out = torch.zeros_like(tokens)
        starts = cu_seqlens_q.tolist()
        for index, (start, stop) in enumerate(itertools.pairwise(starts[: requests + 1])):
            if start < stop:
                one = slice(index, index + 1)
                out[start:stop] = paged_attention(
                    tokens[start:stop].unsqueeze(0),
                    key_cache,
                    value_cache,
                    block_table=block_table[one],
                    seq_lens=seqused_k[one],
                    **options,
                )[0].squeeze(0)
        return out.reshape(query.shape)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any, causal: bool
    ) -> torch.Tensor:
        """[t, 1, heads, d] or [t, heads, d] rows of several sequences, one after the other -> [t, 1, heads * d]."""
        if packed.qkv_format != "thd":
            raise NotCoveredError(
                f"packed_seq_params.qkv_format={packed.qkv_format!r}: packed sequences are laid out as 'thd'."
            )
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        out, _lse = packed_attention(
            q,
            k,
            v,
            cu_seqlens=read(packed.cu_seqlens_q),
            cu_seqlens_padded=None if padded is None else read(padded),
            cp_group=self.layout.cp_group,
            layout=self.layout.cp_layout,
            causal=causal,
            softmax_scale=self.softmax_scale,
            window=self.window,
        )
        return out.reshape(out.shape[0], 1, -1)
