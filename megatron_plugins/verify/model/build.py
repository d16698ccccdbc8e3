"""One GPT through real megatron-core: configuration, construction in any layout, weights that no layout enters."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_plugins.verify.model.plan import Row, Shape

SEED = 1234
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def configuration(
    shape: Shape, row: Row, dtype: torch.dtype, device: str, **changes: Any
) -> TransformerConfig:
    """Megatron's configuration of the model; `changes` replace or add values."""
    values: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "tensor_model_parallel_size": row.tp,
        "context_parallel_size": row.cp,
        "pipeline_model_parallel_size": row.pp,
        "sequence_parallel": row.sp,
        "calculate_per_token_loss": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": device == "cpu",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "init_method_std": shape.init_std,
    }
    return TransformerConfig(**{**values, **changes})


def initialize(row: Row) -> None:
    """Point megatron's parallel state at the current default process group."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        context_parallel_size=row.cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)


def build(
    shape: Shape, config: TransformerConfig, spec: Any, renamed: Callable[[str], str] = str
) -> GPTModel:
    """This rank's part of the model, with weights that depend on their names and whole shapes alone.

    Args:
        renamed: what a parameter is called for that purpose, where two specs name one differently.
    """
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence * shape.batch,
        position_embedding_type="rope",
        rotary_base=1000000,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    fill_by_name(model, lambda name: renamed(global_name(model, name)), shape.init_std)
    return model


def global_name(model: Any, name: str) -> str:
    """A parameter's name in the whole model: a pipeline stage counts its layers from zero."""
    head, found, tail = name.partition("decoder.layers.")
    if not found:
        return name
    index, _, rest = tail.partition(".")
    return f"{head}{found}{model.decoder.layers[int(index)].layer_number - 1}.{rest}"


def shard(
    name: str, full: torch.Tensor, like: torch.Tensor, tp: int, rank: int, gated: bool = True
) -> torch.Tensor:
    """A TP rank's part of a full tensor: cut along the one dimension that is shorter in `like`.

    Args:
        gated: the MLP's first linear holds ``[gate; up]``.
    """
    for dim in range(full.dim()):
        if full.shape[dim] != like.shape[dim]:
            if gated and "linear_fc1" in name:  # each half is cut
                return torch.cat([half.chunk(tp, dim)[rank] for half in full.chunk(2, dim)], dim)
            return full.chunk(tp, dim)[rank]
    return full


def is_sharded(parameter: torch.nn.Parameter) -> bool:
    """Whether tensor parallelism cuts this parameter."""
    return parallel_state.get_tensor_model_parallel_world_size() > 1 and bool(
        getattr(parameter, "tensor_model_parallel", False)
    )


def fill_by_name(model: Any, whole_name: Callable[[str], str], std: float) -> None:
    """Random weights, the same model in every layout; norms around one, so that their order of rounding shows."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = list(parameter.shape)
            if is_sharded(parameter):
                shape[parameter.partition_dim] *= tp
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(whole_name(name).encode()))
            full = torch.randn(shape, generator=generator, device=parameter.device) * std
            whole = full + ("norm" in name)
            parameter.copy_(shard(name, whole, parameter, tp, rank, model.config.gated_linear_unit))
