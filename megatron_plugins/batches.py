"""What a batch brings along that would change its attention, looked at before the model runs it.

The core attention is causal by its type and reads no mask, and RoPE is replaced where training calls it. A mask that
says something else (documents kept apart by `reset_attention_mask`, padding in front), and an inference context that
rotates by a fused kernel of its own, would be answered by other numbers than were asked for. Both are refused by name.

A mask is compared once for every new shape, because reading it waits for the device: of two masks of one shape the
second is not looked at. Masks that are not boolean [b or 1, 1, s of this rank, s of all] are not looked at either;
TransformerEngine's causal attention ignores those as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_plugins.call_arguments import call_arguments
from megatron_plugins.modules.core_attention import DeterministicCoreAttention
from patches.errors import NotCoveredError
from te_overrides.kernels.zigzag.reference import rank_positions


def checker_of(model: Any) -> Callable[..., None]:
    """A forward pre-hook (with keywords) for a built GPTModel or HybridModel of deterministic layers.

    The hook raises:
        NotCoveredError: a mask of a new shape that is not the causal one; fused RoPE in dynamic batching.
    """
    cores = [module for module in model.modules() if isinstance(module, DeterministicCoreAttention)]
    causal = bool(cores) and all(core.attn_mask_type.name == "causal" for core in cores)
    known: set[torch.Size] = set()

    def check(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = call_arguments(module, args, kwargs)
        context: Any = given.get("inference_context")
        if context is None:
            context = given.get("inference_params")
        if getattr(context, "use_flashinfer_fused_rope", False) and not context.is_static_batching():
            raise NotCoveredError(
                "use_flashinfer_fused_rope=True in the inference context: its kernel rounds once where the contract "
                "rounds three times, so decode would not have the bits of training. Build the context with "
                "use_flashinfer_fused_rope=False."
            )
        mask = given.get("attention_mask")
        if causal and isinstance(mask, torch.Tensor) and given.get("packed_seq_params") is None:
            layout = cores[0].layout
            if _is_square(mask, layout.cp_size) and mask.shape not in known:
                _require_causal(mask, layout)
                known.add(mask.shape)

    return check


def _is_square(mask: torch.Tensor, cp_size: int) -> bool:
    """Whether it has a row for every token of this rank and a column for every token of all."""
    return mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[-2] * cp_size == mask.shape[-1]


def _require_causal(mask: torch.Tensor, layout: Any) -> None:
    keys = torch.arange(mask.shape[-1], device=mask.device)
    rows = rank_positions(mask.shape[-1], layout.cp_size, layout.cp_rank, layout.cp_layout).to(mask.device)
    differs = mask != (keys > rows.unsqueeze(1))
    if wrong := int(differs.sum()):
        batch, head, row, key = differs.nonzero()[0].tolist()
        raise NotCoveredError(
            f"an attention mask {list(mask.shape)} that is not the causal one: {wrong} of {mask.numel()} elements "
            f"differ, the first at batch row {batch}, head {head}, query {row} of this rank, key {key}. The attention "
            "contract is causal and reads no mask. Pack the sequences (packed_seq_params), which keeps documents apart "
            "and knows padding, or pass no mask."
        )
