"""TransformerEngine's context-parallel attention, computed by ownership instead of by a ring.

Making the merge reproducible does not make the ring independent of its size: a ring of four merges other partial sums
than a ring of two, and the all-gather runtime reduces partial dK and dV. In mode `invariant` the whole runtime is
therefore replaced: operands are gathered, every rank computes its own rows over all keys (and its own keys' gradients
over all queries), and the bits are those of one rank (`te_overrides/kernels/attention/context_parallel.py`).

Seam: `attn_forward_func_with_cp` is the one entry that both backends call for every communication type, with 15
positional parameters since 1.11 and keywords that grow with every version, some inserted in the middle of the list. So
arguments are bound by name, and each parameter has a rule below; a parameter that no rule knows must keep upstream's
default. `backends.py` imports the function by name, so it must be replaced the moment its module has executed.

Called only for more than one rank; at CP=1 core attention comes from the layer spec, or from TransformerEngine's module
(`single_rank_attention.py`), and runs the same code. Tokens lie in zigzag order, as TransformerEngine and Megatron cut
every batch, for every communication type: p2p, all_gather, a2a and a2a+p2p all land here with equal bits. The two
groups of a2a+p2p must form the order of `cp_global_ranks`, and one group must have it; anything else would put rows at
other positions than upstream's own ring. `cp_comm_type` and the choice of kernel (`use_fused_attention`,
`use_flash_attn_3`, `deterministic`) select among upstream's implementations and do not enter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patches import override
from patches.errors import NotCoveredError

if TYPE_CHECKING:
    import inspect

# qkv_format -> attn_mask_type -> causal
_CAUSAL_OF_MASK = {
    "sbhd": {"causal": True, "no_mask": False},
    "bshd": {"causal": True, "no_mask": False},
    "thd": {"padding_causal": True, "padding": False},
}
# What else must hold, and what to do about it.
_REQUIRED = {
    "dropout_p": (0.0, "set attention dropout to 0"),
    "attn_bias_type": ("no_bias", "use a model without attention bias"),
    "attn_bias": (None, "use a model without attention bias"),
    "softcap": (0.0, "use a model without logit soft-capping"),
    "softmax_type": ("vanilla", "use a model without attention sinks"),
    "softmax_offset": (None, "use a model without attention sinks"),
    "fp8": (False, "run attention in bf16"),
    "fp8_output": (False, "run attention in bf16"),
    "return_max_logit": (False, "switch QK clipping off"),
}
# Read by the replacement.
_USED = {
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "cp_group",
    "cp_global_ranks", "softmax_scale", "qkv_format", "attn_mask_type", "window_size", "load_balancing_strategy",
}  # fmt: skip
# They choose among upstream's kernels, streams and transports, or serve features refused above.
_WITHOUT_EFFECT = {
    "is_training", "max_seqlen_q", "max_seqlen_kv", "cp_stream", "cp_comm_type", "deterministic",
    "use_fused_attention", "use_flash_attn_3", "use_flash_attn_4", "fp8_meta", "quantizers", "layer_number",
    # Every packed sequence's padding is told apart by its boundaries, whatever this says.
    "pad_between_seqs",
}  # fmt: skip


@override(
    id="te.context_parallel_runtime",
    target="transformer_engine.pytorch.attention.dot_product_attention.context_parallel:attn_forward_func_with_cp",
    modes=("invariant",),
    why="ring and all-gather reduce partial results, so the context-parallel degree is in the bits",
    how="operands are gathered; every row of out, dQ, dK and dV is computed completely by its owner",
    retire_when="upstream offers a context-parallel runtime whose bits do not depend on the degree",
    evidence="docs/attention.md",
    distribution="transformer-engine",
    versions=">=2.3",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)

    def attn_forward_func_with_cp(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        refuse_what_is_not_covered(bound.arguments, signature)
        return attention(bound.arguments)

    return attn_forward_func_with_cp


def refuse_what_is_not_covered(arguments: dict[str, Any], signature: inspect.Signature) -> None:
    """Raise NotCoveredError for the first argument that the contract does not cover."""
    for name, value in arguments.items():
        if name in _REQUIRED:
            wanted, way_out = _REQUIRED[name]
            # A tensor never compares to its default; `is` keeps it from being compared element by element.
            if value is not wanted and (not isinstance(value, (bool, int, float, str)) or value != wanted):
                _refuse(f"{name}={value!r}", f"covered: {wanted!r}", way_out)
        elif name not in _USED and name not in _WITHOUT_EFFECT:
            default = signature.parameters[name].default
            if value is not default and value != default:
                _refuse(
                    f"{name}={value!r}", "a parameter newer than this override", f"leave it at {default!r}"
                )
    strategy = arguments.get("load_balancing_strategy")
    if getattr(strategy, "name", "DUAL_CHUNK_SWAP") != "DUAL_CHUNK_SWAP":
        _refuse(f"load_balancing_strategy={strategy}", "covered: DUAL_CHUNK_SWAP", "leave it at its default")
    qkv_format, mask = arguments["qkv_format"], arguments["attn_mask_type"]
    if qkv_format not in _CAUSAL_OF_MASK:
        _refuse(f"qkv_format={qkv_format!r}", f"covered: {sorted(_CAUSAL_OF_MASK)}", "convert the batch")
    if mask not in _CAUSAL_OF_MASK[qkv_format]:
        _refuse(
            f"attn_mask_type={mask!r} with qkv_format={qkv_format!r}",
            f"covered: {sorted(_CAUSAL_OF_MASK[qkv_format])}",
            "pack padded batches as thd, use a causal or full mask otherwise",
        )
    q, k = arguments["q"], arguments["k"]
    if tuple(q.shape[:-2]) != tuple(k.shape[:-2]):
        _refuse(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} in {qkv_format}",
            "covered: self-attention, equally many rows of both",
            "run cross-attention without context parallelism",
        )


def _refuse(found: str, rule: str, way_out: str) -> None:
    raise NotCoveredError(
        f"TransformerEngine's attention was called with {found}; {rule}. Either {way_out}, or run with "
        "--deterministic-rocm=stable, which keeps upstream's runtime."
    )


def _ranks(cp_group: Any, cp_global_ranks: Any) -> Any:
    """The context-parallel ranks in upstream's order.

    Raises:
        NotCoveredError: groups whose order is not that of `cp_global_ranks`.
    """
    import torch.distributed as dist

    from te_overrides.kernels.attention.ranks import Levels
    from te_overrides.kernels.attention.reference import AttentionError

    if cp_group is None:
        return None
    global_ranks = [int(rank) for rank in cp_global_ranks]
    if isinstance(cp_group, (list, tuple)):
        try:
            return Levels.of(cp_group, global_ranks)
        except AttentionError as error:
            raise NotCoveredError(str(error)) from error
    found = dist.get_process_group_ranks(cp_group)
    if found != global_ranks:
        _refuse(
            f"cp_global_ranks={global_ranks} for a cp_group of the global ranks {found}",
            "rows are put in order by their rank in the group, so both must name one order",
            "pass torch.distributed.get_process_group_ranks(cp_group)",
        )
    return cp_group


def attention(arguments: dict[str, Any]) -> Any:
    """Output in the shape of q with the head dimension of v, contiguous.

    Args:
        arguments: those of the entry point by name, defaults included, examined before.
    """
    from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention

    q, k, v = (arguments[name] for name in "qkv")
    qkv_format = arguments["qkv_format"]
    window = arguments["window_size"]
    options: dict[str, Any] = {
        "cp_group": _ranks(arguments["cp_group"], arguments["cp_global_ranks"]),
        "layout": "zigzag",
        "causal": _CAUSAL_OF_MASK[qkv_format][arguments["attn_mask_type"]],
        "softmax_scale": arguments["softmax_scale"],
        "window": None if window is None else tuple(window),
    }
    if qkv_format == "thd":
        boundaries = _boundaries(arguments)
        return packed_attention(q, k, v, **boundaries, **options)[0].contiguous()
    if qkv_format == "bshd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = context_parallel_attention(q, k, v, **options)[0]
    return (out.transpose(0, 1) if qkv_format == "bshd" else out).contiguous()


def _boundaries(arguments: dict[str, Any]) -> dict[str, Any]:
    """Boundaries of packed sequences: those of the whole batch, queries' and keys' equal."""
    for ours, theirs in (("cu_seqlens_q", "cu_seqlens_kv"), ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")):
        first, second = arguments[ours], arguments[theirs]
        if first is not second and (first is None or second is None or not first.equal(second)):
            _refuse(
                f"{ours} different from {theirs}",
                "covered: self-attention",
                "give queries and keys one packing",
            )
    return {"cu_seqlens": arguments["cu_seqlens_q"], "cu_seqlens_padded": arguments["cu_seqlens_q_padded"]}
