"""Dynamic batching's attention: the paged cache is read by the attention of training and prefill.

Upstream's inference calls flash attention past the layer spec: variants for decode and prefill, whose split of a long
sequence follows the batch. A rollout's log-probabilities then differ from the actor's. Here the core attention of the
layer is asked, which reads pages in place and computes a row by its position alone.

Seam: `Attention.flash_decode_and_prefill`, the one method that calls those variants, with the caches, the block table
and the lengths as arguments, from 0.14 to 0.19. What is asked for is what the core declares (`supports_paged_kv`): a
core without it is refused, never replaced by upstream's kernels. `flash_decode` (static batching in one fused kernel
with RoPE) is another method and refused by its setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import NotCoveredError


@override(
    id="megatron.paged_attention",
    target="megatron.core.transformer.attention:Attention.flash_decode_and_prefill",
    modes=("invariant",),
    why="decode and prefill run other kernels than training, split by batch and length",
    how="the layer's core attention reads the paged cache; a row's bits depend on its position alone",
    retire_when="upstream's decode over a paged cache has the bits of its training forward",
    evidence="docs/attention.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    def flash_decode_and_prefill(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqlens_k: Any,
        block_table: Any,
        is_decode_only: bool | None = None,
        softmax_offset: Any = None,
    ) -> Any:
        if softmax_offset is not None:
            raise NotCoveredError(
                "softmax_offset was passed to paged attention: attention sinks are not part of the contract."
            )
        core = self.core_attention
        if not getattr(core, "supports_paged_kv", False):
            reason = getattr(core, "paged_kv_refusal", None)
            raise NotCoveredError(
                f"dynamic batching asked {type(core).__name__} for attention over a paged cache: "
                f"{reason() if reason is not None else 'it does not declare it'}. Build the model with --spec "
                "megatron_plugins.layer_specs deterministic_gpt_layer_spec, or run inference with "
                "--deterministic-rocm=stable."
            )
        uniform = is_decode_only if is_decode_only is not None else max_seqlen_q == 1
        return core.forward_paged(
            q,
            k,
            v,
            block_table=block_table,
            seqused_k=seqlens_k,
            cu_seqlens_q=None if uniform else cu_seqlens_q,
        )

    return flash_decode_and_prefill
