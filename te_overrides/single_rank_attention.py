"""TransformerEngine's attention module at CP=1, through the code that serves every other degree.

`DotProductAttention` calls the context-parallel runtime only for more than one rank. With that alone replaced
(`context_parallel_runtime.py`), a model at CP=1 would keep upstream's kernels and CP=2 would have other bits. Refusing
CP=1 would be a promise without its point of comparison, so it is computed: by the same rules, by the same attention.

Seam: `DotProductAttention.forward`, the only place that knows the degree and has everything resolved from the
constructor. With more than one rank upstream's own forward goes on and reaches the replaced runtime; what it checks and
chooses on the way does not enter. Arguments are bound by name: upstream adds some with every release, in the middle
too. Each has a rule below or must keep its default.

Refused: KV caches (`inference_params`), whose kernels are upstream's (paged attention with the bits of training is
`megatron_plugins.modules.core_attention`), operands given packed in one tensor, and what the runtime refuses as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patches import override
from patches.errors import NotCoveredError

if TYPE_CHECKING:
    import inspect

# Given to the runtime under its own name for them, or read here.
_PASSED = {
    "query_layer": "q", "key_layer": "k", "value_layer": "v", "core_attention_bias_type": "attn_bias_type",
    "core_attention_bias": "attn_bias", "fp8_output": "fp8_output",
    **{name: name for name in (
        "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "qkv_format", "attn_mask_type",
        "window_size", "softcap",
    )},
}  # fmt: skip
# They size buffers, choose among upstream's kernels, save memory, or matter for masks and formats refused elsewhere.
_WITHOUT_EFFECT = {
    "self", "attention_mask", "max_seqlen_q", "max_seqlen_kv", "bottom_right_diagonal", "checkpoint_core_attention",
    "fast_zero_fill", "pad_between_seqs", "bf16_backward", "num_splits", "qkv_interleave_dim",
    "thd_attention_policy_dispatch",
}  # fmt: skip
_FROM_MODULE = ("qkv_format", "attn_mask_type", "window_size", "softcap")
# Attributes of the module, in releases that have them, with a rule among the runtime's parameters.
_EXAMINED = ("softmax_type", "return_max_logit")


@override(
    id="te.single_rank_attention",
    target="transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention:DotProductAttention.forward",
    modes=("invariant",),
    why="at CP=1 upstream runs its own kernels, so CP=1 and CP=2 would differ",
    how="one rank runs the attention that every degree runs; more ranks go on in upstream's forward",
    retire_when="upstream's attention at CP=1 has the bits of its context-parallel runtime, whatever the degree",
    evidence="docs/attention.md",
    distribution="transformer-engine",
    versions=">=2.3",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _cp_size(self.cp_group) > 1:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return _on_one_rank(self, bound.arguments, signature)

    return forward


def _cp_size(cp_group: Any) -> int:
    import torch.distributed as dist

    groups = cp_group if isinstance(cp_group, (list, tuple)) else [] if cp_group is None else [cp_group]
    size = 1
    for group in groups:
        size *= dist.get_world_size(group)
    return size


def _on_one_rank(module: Any, given: dict[str, Any], signature: inspect.Signature) -> Any:
    from te_overrides import context_parallel_runtime as runtime

    arguments: dict[str, Any] = {"cp_group": None, "cp_global_ranks": None}
    for name, value in given.items():
        if name in _PASSED:
            arguments[_PASSED[name]] = value
        elif name not in _WITHOUT_EFFECT:
            default = signature.parameters[name].default
            if value is not default:
                raise NotCoveredError(
                    f"DotProductAttention at CP=1 was called with {name}: not part of the attention contract. Leave it "
                    f"at {default!r}, or run with --deterministic-rocm=stable, which keeps upstream's kernels."
                )
    for name in _FROM_MODULE:
        if arguments.get(name) is None:
            arguments[name] = getattr(module, name, None)
    if arguments.get("softcap") is None:
        arguments["softcap"] = 0.0
    # As upstream spells it.
    mask = arguments["attn_mask_type"].replace(",", "_")
    arguments["attn_mask_type"] = "padding_causal" if mask == "causal_padding" else mask
    arguments.update((name, getattr(module, name)) for name in _EXAMINED if hasattr(module, name))
    arguments["dropout_p"] = module.attention_dropout if module.training else 0.0
    arguments["fp8"] = _in_fp8()
    # Before 2.20 the module itself does not keep it.
    arguments["softmax_scale"] = module.flash_attention.softmax_scale
    runtime.refuse_what_is_not_covered(arguments, signature)
    if module.attention_type != "self":
        raise NotCoveredError(
            f"DotProductAttention with attention_type={module.attention_type!r}: the contract covers 'self'. Run with "
            "--deterministic-rocm=stable, which keeps upstream's kernels."
        )
    out = runtime.attention(arguments)
    # Heads folded into one dimension, as the projection behind attention takes them.
    return out.reshape(*out.shape[:-2], -1)


def _in_fp8() -> bool:
    """Whether attention itself would run in FP8; linears in FP8 are refused elsewhere."""
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None and manager.is_fp8_enabled():
            recipe = manager.get_fp8_recipe()
            return bool(getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False))
    return False
