"""Modules that declare overrides. Names only: they are imported when the layer is armed, and import no torch then."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

DECLARATIONS = (
    "te_overrides.lse_merge",
    "te_overrides.lse_merge_second_half",
    "te_overrides.out_correction_init",
    "te_overrides.out_correction",
    "te_overrides.out_correction_second_half",
    "te_overrides.incremental_out_correction",
    "te_overrides.incremental_out_correction_second_half",
    "te_overrides.thd_second_half_lse_correction",
    "te_overrides.thd_out_correction",
    "te_overrides.context_parallel_runtime",
    "te_overrides.single_rank_attention",
    "te_overrides.before_context_parallel_module",
    "te_overrides.allreduce",
    "te_overrides.symmetric_all_reduce",
    "te_overrides.reduce_scatter_along_first_dim",
    "te_overrides.aiter_add_rmsnorm",
    "te_overrides.aiter_add_rmsnorm_smoothquant",
    "te_overrides.aiter_add_rmsnorm_dynamicquant",
    "megatron_plugins.overrides.rope",
    "megatron_plugins.overrides.block_final_norm",
    "megatron_plugins.overrides.gpt_model",
    "megatron_plugins.overrides.hybrid_model",
    "megatron_plugins.overrides.language_model_loss",
    "megatron_plugins.overrides.grad_norm",
    "megatron_plugins.overrides.gradient_buckets",
    "megatron_plugins.overrides.tensor_parallel_reduce",
    "megatron_plugins.overrides.tensor_parallel_reduce_scatter",
    "megatron_plugins.overrides.linear_reduce_scatter",
    "megatron_plugins.overrides.linear_input_gradient",
    "megatron_plugins.overrides.frozen_linear_input_gradient",
    "megatron_plugins.overrides.paged_inference",
    "megatron_plugins.overrides.megatron_parse_args",
    "megatron_plugins.overrides.megatron_validate_args",
)


def declare_all(names: Sequence[str] | None = None) -> None:
    """Import every declaring module once: those named, or the catalogue."""
    for name in DECLARATIONS if names is None else names:
        importlib.import_module(name)
