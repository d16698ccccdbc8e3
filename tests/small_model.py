"""The small Qwen3-shaped GPT of the tests: run in any layout, its results put together again into whole tensors.

`megatron_plugins.verify.model` compares shards in place; a test that changes a configuration or looks at one tensor
wants the whole of it: logits over the whole vocabulary in position order, whole gradients as autograd leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_plugins.verify.model import build as building
from megatron_plugins.verify.model import train
from megatron_plugins.verify.model.plan import Row, Shape

LAYERS, GROUPS, SEQUENCE, BATCH = 2, 4, 128, 2
VOCABULARY = 1024


def layout_of(tp: int = 1, cp: int = 1, sp: bool = False) -> Row:
    """Parallel degrees of one run."""
    return Row("", tp=tp, cp=cp, sp=sp)


def shape() -> Shape:
    """Sizes of the model, as the module's names say now."""
    return Shape("small", LAYERS, 64, 192, 8, GROUPS, 16, VOCABULARY, SEQUENCE, BATCH)


def byte_tokens(docs: Path, micro_batches: int) -> torch.Tensor:
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


def config_for(layout: Row, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of the small model."""
    return building.configuration(shape(), layout, dtype, "cpu")


initialize = building.initialize


def build(
    layout: Row, dtype: torch.dtype, spec: Any = "deterministic", renamed: Callable[[str], str] = str
) -> GPTModel:
    """A GPTModel of `layout` with weights that depend on names and shapes alone; `spec` is a layer spec or a side."""
    spec = train.spec_of(spec) if isinstance(spec, str) else spec
    return building.build(shape(), config_for(layout, dtype), spec, renamed)


def fill_by_name(model: GPTModel, renamed: Callable[[str], str] = str) -> None:
    """The weights that `build` gives a model, once more."""
    building.fill_by_name(model, renamed, shape().init_std)


def positions_of(layout: Row) -> torch.Tensor:
    """Global positions of this rank's tokens."""
    return train.positions_of(layout, SEQUENCE)


def gather(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """`x` of every rank, in rank order."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def unshard(name: str, parts: list[torch.Tensor], dim: int, gated: bool = True) -> torch.Tensor:
    """The whole parameter of every TP rank's part."""
    if gated and "linear_fc1" in name:
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim)
    return torch.cat(parts, dim)


def whole_sequence(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[B, s, ...] of every CP rank to [B, SEQUENCE, ...]."""
    group = parallel_state.get_context_parallel_group()
    out = torch.empty(x.shape[0], SEQUENCE, *x.shape[2:], dtype=x.dtype)
    for where, part in zip(gather(positions, group), gather(x, group), strict=True):
        out[:, where] = part
    return out


def whole_gradients(model: GPTModel, layout: Row) -> dict[str, torch.Tensor]:
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
        if building.is_sharded(parameter):
            gated = model.config.gated_linear_unit
            grad = unshard(name, gather(grad, tp_group), parameter.partition_dim, gated)
        out[name] = grad
    return out


def _mean_loss() -> Callable[[torch.Tensor], torch.Tensor]:
    from megatron_plugins.loss import mean_loss
    from megatron_plugins.parallel_layout import ParallelLayout

    whole = ParallelLayout(None, None, False)
    return lambda per_token: mean_loss(per_token, torch.ones_like(per_token), whole)


def step(
    model: GPTModel, layout: Row, tokens: torch.Tensor, side: str = "deterministic"
) -> dict[str, torch.Tensor]:
    """Forward and backward of one micro-batch [B, SEQUENCE + 1]. Gradients add up in the parameters.

    Args:
        side: whose log-probability and mean are taken.

    Returns:
        logits [B, S, V], logprobs [B, S] (of the next token), loss.
    """
    mean = _mean_loss() if side == "deterministic" else torch.mean
    positions = positions_of(layout)
    ids, labels = tokens[:, :-1][:, positions].contiguous(), tokens[:, 1:][:, positions].contiguous()
    mask = ~torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    where = positions.expand(BATCH, -1).contiguous()
    with torch.no_grad():
        logits = model(ids, where, mask)
        chosen = train.log_prob(side, logits, labels)
    per_token = model(ids, where, mask, labels=labels)
    (per_token / (BATCH * SEQUENCE)).sum().backward()
    whole = torch.cat(gather(logits, parallel_state.get_tensor_model_parallel_group()), dim=-1)
    return {
        "logits": whole_sequence(whole, positions),
        "logprobs": whole_sequence(chosen, positions),
        "loss": mean(whole_sequence(per_token.detach(), positions)),
    }


def run_model(model: GPTModel, layout: Row, tokens: torch.Tensor) -> dict[str, Any]:
    """Results of every micro-batch, stacked, and the gradients of all of them."""
    steps = [step(model, layout, batch) for batch in tokens]
    whole = {what: torch.stack([s[what] for s in steps]) for what in ("logits", "logprobs", "loss")}
    return {**whole, "gradients": whole_gradients(model, layout)}
