"""One small Qwen3-shaped Megatron GPT: built in any layout, loaded from one checkpoint, run for some micro-batches.

What a layout computed is put together again into whole tensors (logits over the whole vocabulary in position order,
whole gradients), so that two layouts can be compared element by element.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, LAYERS = 8, 4, 16, 64, 192, 2
VOCABULARY = 1024
SEQUENCE, BATCH, MICRO_BATCHES = 128, 2, 3
INITIAL_SEED = 1234
GATED = True
"""Whether the first projection of the MLP is packed ``[gate; up]``, each half cut over ranks."""


@dataclass(frozen=True)
class Layout:
    """Parallel degrees of one run."""

    name: str
    tp: int = 1
    cp: int = 1
    sp: bool = False


def byte_tokens(docs: Path, micro_batches: int = MICRO_BATCHES) -> torch.Tensor:
    """[micro_batches, BATCH, SEQUENCE + 1] int64: the bytes of this repository's documentation."""
    text = b"".join(path.read_bytes() for path in sorted(docs.glob("*.md")))
    need = micro_batches * BATCH * (SEQUENCE + 1)
    if len(text) < need:
        raise ValueError(f"{docs} holds {len(text)} bytes of Markdown, the run needs {need}")
    return (
        torch.frombuffer(bytearray(text[:need]), dtype=torch.uint8)
        .long()
        .view(micro_batches, BATCH, SEQUENCE + 1)
    )


def config_for(layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of the small model."""
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sp,
        calculate_per_token_loss=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        init_method_std=0.1,
    )


def initialize(layout: Layout) -> None:
    """Point megatron's parallel state at the current default process group."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, context_parallel_size=layout.cp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(INITIAL_SEED)


def build(layout: Layout, dtype: torch.dtype, spec: Any) -> GPTModel:
    """A GPTModel of `layout` with the given layer spec, freshly initialized."""
    torch.manual_seed(INITIAL_SEED)
    return GPTModel(
        config=config_for(layout, dtype),
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        rotary_base=1000000,
        share_embeddings_and_output_weights=False,
    )


def _shard(name: str, full: torch.Tensor, like: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """This rank's part of a full tensor: cut along the one dimension that is shorter here."""
    for dim in range(full.dim()):
        if full.shape[dim] != like.shape[dim]:
            if GATED and "linear_fc1" in name:
                return torch.cat([half.chunk(tp, dim)[rank] for half in full.chunk(2, dim)], dim)
            return full.chunk(tp, dim)[rank]
    return full


def _unshard(name: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    if GATED and "linear_fc1" in name:
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim)
    return torch.cat(parts, dim)


def load(model: GPTModel, checkpoint: dict[str, torch.Tensor]) -> None:
    """Load the one checkpoint into this rank's shards; a name that is missing or left over is an error."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != checkpoint.keys():
        odd = sorted(parameters.keys() ^ checkpoint.keys())
        raise ValueError(f"model and checkpoint name different parameters: {odd}")
    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_shard(name, checkpoint[name], parameter, tp, rank))


def fill_by_name(model: Any, global_name: Callable[[str], str] = str) -> None:
    """Random weights that depend on a parameter's name and whole shape alone: the same model in every layout.

    Args:
        global_name: the name in the whole model, where a pipeline stage names its own part.
    """
    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = list(parameter.shape)
            if tp > 1 and getattr(parameter, "tensor_model_parallel", False):
                shape[parameter.partition_dim] *= tp
            generator = torch.Generator().manual_seed(zlib.crc32(global_name(name).encode()))
            full = torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)
            parameter.copy_(_shard(name, full, parameter, tp, rank))


def make_checkpoint(model: GPTModel) -> dict[str, torch.Tensor]:
    """Weights of an unsharded model; norm weights are moved off one, so that their order of rounding shows."""
    generator = torch.Generator().manual_seed(INITIAL_SEED)
    checkpoint = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if "norm" in name:
            value += 0.1 * torch.randn(value.shape, generator=generator).to(value.dtype)
        checkpoint[name] = value
    return checkpoint


def _positions(layout: Layout) -> torch.Tensor:
    """Global positions of this rank's tokens, as Megatron cuts them: zigzag over CP."""
    chunks = torch.arange(SEQUENCE).chunk(2 * layout.cp)
    rank = parallel_state.get_context_parallel_rank()
    return (
        torch.cat([chunks[rank], chunks[2 * layout.cp - 1 - rank]])
        if layout.cp > 1
        else torch.arange(SEQUENCE)
    )


def _gather(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _whole_sequence(x: torch.Tensor, layout: Layout, positions: torch.Tensor) -> torch.Tensor:
    """[B, s, ...] of every CP rank to [B, SEQUENCE, ...]."""
    group = parallel_state.get_context_parallel_group()
    out = torch.empty(x.shape[0], SEQUENCE, *x.shape[2:], dtype=x.dtype)
    for where, part in zip(_gather(positions, group), _gather(x, group), strict=True):
        out[:, where] = part
    return out


def whole_gradients(model: GPTModel, layout: Layout) -> dict[str, torch.Tensor]:
    """Gradients summed and put together as Megatron's optimizer would see them.

    Over CP by all-reduce, as data-parallel buckets do; over TP by all-reduce for norms under sequence parallelism and
    for q/k-norms, as ``_allreduce_non_tensor_model_parallel_grads`` does; shards concatenated.
    """
    tp_group, cp_group = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
    )
    out = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.detach().clone()
        if layout.cp > 1:
            dist.all_reduce(grad, group=cp_group)
        summed = (
            getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name
        )
        if layout.tp > 1 and summed:
            dist.all_reduce(grad, group=tp_group)
        if layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            grad = _unshard(name, _gather(grad, tp_group), parameter.partition_dim)
        out[name] = grad
    return out


def step(
    model: GPTModel, layout: Layout, tokens: torch.Tensor, *, mean_loss: Any, log_prob: Any
) -> dict[str, torch.Tensor]:
    """Forward and backward of one micro-batch. Gradients add up in the parameters.

    Args:
        tokens: [B, SEQUENCE + 1] int64.
        mean_loss: ``(per_token [B, SEQUENCE]) -> scalar`` to report.
        log_prob: ``(logits [B, s, V / TP], labels [B, s]) -> [B, s]``.

    Returns:
        logits [B, S, V], logprobs [B, S] (of the next token), loss.
    """
    positions = _positions(layout)
    ids, labels = tokens[:, :-1][:, positions].contiguous(), tokens[:, 1:][:, positions].contiguous()
    mask = ~torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    with torch.no_grad():
        logits = model(ids, positions.expand(BATCH, -1).contiguous(), mask)
        chosen = log_prob(logits, labels)
    per_token = model(ids, positions.expand(BATCH, -1).contiguous(), mask, labels=labels)
    (per_token / (BATCH * SEQUENCE)).sum().backward()
    whole = torch.cat(_gather(logits, parallel_state.get_tensor_model_parallel_group()), dim=-1)
    return {
        "logits": _whole_sequence(whole, layout, positions),
        "logprobs": _whole_sequence(chosen, layout, positions),
        "loss": mean_loss(_whole_sequence(per_token.detach(), layout, positions)),
    }
