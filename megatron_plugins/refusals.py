"""What the numbers contract cannot cover: each refusal names the value, the rule and the way out (docs/limits.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_overrides.kernels.gemm.reference import LANES


@dataclass(frozen=True)
class Rule:
    """One refusal: when it applies, what was found, and what to do."""

    applies: Callable[[Any], bool]
    found: Callable[[Any], str]
    rule: str
    way_out: str | Callable[[Any], str]


def _get(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: bool(_get(c, "fp8")) or bool(_get(c, "fp4")),
        lambda c: f"fp8={_get(c, 'fp8')!r}, fp4={_get(c, 'fp4')!r}",
        "scaling factors of low-precision formats depend on the layout",
        "train in bf16, fp16 or float32",
    ),
    Rule(
        lambda c: bool(_get(c, "num_moe_experts")) or _get(c, "expert_model_parallel_size", 1) > 1,
        lambda c: (
            f"num_moe_experts={_get(c, 'num_moe_experts')}, expert_model_parallel_size="
            f"{_get(c, 'expert_model_parallel_size', 1)}"
        ),
        "routing and expert sums are not part of the contract yet",
        "use a dense model",
    ),
    Rule(
        lambda c: _get(c, "hidden_dropout", 0.0) > 0 or _get(c, "attention_dropout", 0.0) > 0,
        lambda c: (
            f"hidden_dropout={_get(c, 'hidden_dropout')}, attention_dropout={_get(c, 'attention_dropout')}"
        ),
        "a dropout mask is drawn per rank and differs between layouts",
        "set --hidden-dropout 0 --attention-dropout 0",
    ),
    Rule(
        lambda c: bool(_get(c, "tp_comm_overlap")),
        lambda c: "tp_comm_overlap=True",
        "TransformerEngine's userbuffers reduce in an order of their own",
        "drop --tp-comm-overlap",
    ),
    Rule(
        lambda c: bool(_get(c, "flash_decode")),
        lambda c: "flash_decode=True",
        "its fused decoding kernel splits a sequence by batch and length",
        "drop --flash-decode: static and dynamic batching decode with the bits of prefill",
    ),
    Rule(
        lambda c: bool(_get(c, "cpu_offloading")) or bool(_get(c, "defer_embedding_wgrad_compute")),
        lambda c: (
            f"cpu_offloading={_get(c, 'cpu_offloading')}, defer_embedding_wgrad_compute="
            f"{_get(c, 'defer_embedding_wgrad_compute')}"
        ),
        "the deterministic linears own their weight gradient and do not hand it to these features",
        "switch them off",
    ),
    Rule(
        lambda c: _get(c, "context_parallel_size", 1) > 1 and not _get(c, "calculate_per_token_loss", False),
        lambda c: (
            f"context_parallel_size={_get(c, 'context_parallel_size')} with calculate_per_token_loss=False"
        ),
        "an average taken per context-parallel rank depends on where padding lies",
        "pass --calculate-per-token-loss",
    ),
    Rule(
        lambda c: (_get(c, "gtp_weight_remat_size", 1) or 1) > 1,
        lambda c: f"gtp_weight_remat_size={_get(c, 'gtp_weight_remat_size')}",
        "weights that are cut over data-parallel ranks add their gradients in a group of their own",
        "drop --tensor-parallel-num-weight-shards",
    ),
    Rule(
        lambda c: _get(c, "normalization", "RMSNorm") != "RMSNorm",
        lambda c: f"normalization={_get(c, 'normalization')!r}",
        "only RMSNorm has a reference in the contract",
        "pass --normalization RMSNorm",
    ),
    Rule(
        lambda c: bool(_get(c, "multi_latent_attention")),
        lambda c: "multi_latent_attention=True",
        "its projections are not part of the contract yet",
        "use grouped-query attention",
    ),
    Rule(
        lambda c: bool(_get(c, "attention_output_gate")),
        lambda c: "attention_output_gate=True",
        "upstream's gate compiles a sigmoid, whose bits follow the compiled variant",
        "switch it off",
    ),
    Rule(
        lambda c: bool(_get(c, "apply_rope_fusion")),
        lambda c: "apply_rope_fusion=True",
        "the fused kernel rounds once where the contract rounds three times",
        "pass --no-rope-fusion",
    ),
    Rule(
        lambda c: bool(_get(c, "fused_single_qkv_rope")),
        lambda c: "fused_single_qkv_rope=True",
        "TransformerEngine's fused kernel rotates queries and keys past the contract's RoPE",
        "switch it off",
    ),
    Rule(
        lambda c: (_get(c, "mlp_chunks_for_training", 1) or 1) > 1,
        lambda c: f"mlp_chunks_for_training={_get(c, 'mlp_chunks_for_training')}",
        "weight gradients would be sums over chunks of a rank's own rows, which another layout cuts elsewhere",
        "leave it at 1; recompute whole layers to save memory",
    ),
    Rule(
        lambda c: (
            _get(c, "tensor_model_parallel_size", 1) > 1
            and (_get(c, "num_query_groups") or _get(c, "num_attention_heads", 1))
            % _get(c, "tensor_model_parallel_size")
        ),
        lambda c: (
            f"num_query_groups={_get(c, 'num_query_groups')} at tensor_model_parallel_size="
            f"{_get(c, 'tensor_model_parallel_size')}"
        ),
        "a KV group must lie on one rank, or its lanes are split",
        "choose a TP degree that divides num_query_groups",
    ),
    Rule(
        lambda c: LANES % _get(c, "tensor_model_parallel_size", 1) != 0,
        lambda c: f"tensor_model_parallel_size={_get(c, 'tensor_model_parallel_size')}",
        f"a rank holds whole lanes, and there are {LANES}",
        "use TP 1, 2, 4 or 8",
    ),
    Rule(
        lambda c: bool(_get(c, "ffn_hidden_size")) and _get(c, "ffn_hidden_size") % LANES != 0,
        lambda c: (
            f"ffn_hidden_size={_get(c, 'ffn_hidden_size')} at tensor_model_parallel_size="
            f"{_get(c, 'tensor_model_parallel_size', 1)}"
        ),
        f"the down projection is cut into {LANES} equal lanes",
        f"round ffn_hidden_size up to a multiple of {LANES}",
    ),
)


def refusals(config: Any, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Every rule that `config` (a Megatron config, or parsed arguments) breaks, one sentence each."""
    out = []
    for r in rules:
        if r.applies(config):
            way_out = r.way_out(config) if callable(r.way_out) else r.way_out
            out.append(f"{r.found(config)}: {r.rule}; {way_out}.")
    return out
