"""What the contract cannot cover is refused when a module is built, by value, rule and way out (docs/limits.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import patches
from patches.errors import NotCoveredError
from te_overrides.kernels.gemm.reference import LANES


@dataclass(frozen=True)
class Rule:
    """One refusal: when it applies, what was found, and what to do."""

    applies: Callable[[Any], bool]
    found: Callable[[Any], str]
    rule: str
    way_out: str


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
        lambda c: f"num_moe_experts={_get(c, 'num_moe_experts')}, expert_model_parallel_size="
        f"{_get(c, 'expert_model_parallel_size', 1)}",
        "routing and expert sums are not part of the contract yet",
        "use a dense model",
    ),
    Rule(
        lambda c: _get(c, "hidden_dropout", 0.0) > 0 or _get(c, "attention_dropout", 0.0) > 0,
        lambda c: f"hidden_dropout={_get(c, 'hidden_dropout')}, attention_dropout={_get(c, 'attention_dropout')}",
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
        lambda c: bool(_get(c, "cpu_offloading")) or bool(_get(c, "defer_embedding_wgrad_compute")),
        lambda c: f"cpu_offloading={_get(c, 'cpu_offloading')}, defer_embedding_wgrad_compute="
        f"{_get(c, 'defer_embedding_wgrad_compute')}",
        "the deterministic linears own their weight gradient and do not hand it to these features",
        "switch them off",
    ),
    Rule(
        lambda c: _get(c, "context_parallel_size", 1) > 1 and not _get(c, "calculate_per_token_loss", False),
        lambda c: f"context_parallel_size={_get(c, 'context_parallel_size')} with calculate_per_token_loss=False",
        "an average taken per context-parallel rank depends on where padding lies",
        "pass --calculate-per-token-loss",
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
        lambda c: bool(_get(c, "apply_rope_fusion")),
        lambda c: "apply_rope_fusion=True",
        "the fused kernel rounds once where the contract rounds three times",
        "pass --no-rope-fusion",
    ),
    Rule(
        lambda c: _get(c, "tensor_model_parallel_size", 1) > 1
        and (_get(c, "num_query_groups") or _get(c, "num_attention_heads", 1)) % _get(c, "tensor_model_parallel_size"),
        lambda c: f"num_query_groups={_get(c, 'num_query_groups')} at tensor_model_parallel_size="
        f"{_get(c, 'tensor_model_parallel_size')}",
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
        lambda c: f"ffn_hidden_size={_get(c, 'ffn_hidden_size')} at tensor_model_parallel_size="
        f"{_get(c, 'tensor_model_parallel_size', 1)}",
        f"the down projection is cut into {LANES} equal lanes",
        f"round ffn_hidden_size up to a multiple of {LANES}",
    ),
)


def refusals(config: Any) -> list[str]:
    """Every rule that `config` breaks, one sentence each."""
    return [f"{r.found(config)}: {r.rule}; {r.way_out}." for r in RULES if r.applies(config)]


def require_supported(config: Any, *, is_expert: bool = False) -> None:
    """Raise unless the layer is armed and the contract covers `config`.

    Raises:
        NotCoveredError: with every broken rule in one message.
    """
    if patches.armed_mode() != "invariant":
        raise NotCoveredError(
            "a deterministic module is being built, but the patch layer is "
            f"{patches.armed_mode() or 'not armed'}: parts of the model outside the layer spec would keep upstream's "
            "arithmetic. Start the job with --deterministic-rocm=invariant, or set DETERMINISTIC_ROCM=invariant "
            f"(found {os.environ.get('DETERMINISTIC_ROCM')!r}) and `import patches.auto` before megatron.core."
        )
    broken = refusals(config)
    if is_expert:
        broken.append("is_expert=True: expert layers are not part of the contract yet; use a dense model.")
    if broken:
        raise NotCoveredError("the numbers contract does not cover this model. " + " ".join(broken))
