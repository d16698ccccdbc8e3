"""A DeterministicMLP of real megatron-core in one layout, with weights and tokens that do not depend on the layout."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules

from megatron_plugins.modules.linear import (
    DeterministicColumnParallelLinear,
    DeterministicRowParallelLinear,
)
from megatron_plugins.modules.mlp import DeterministicMLP
from megatron_plugins.parallel_layout import CP_LAYOUT
from megatron_plugins.verify.ffn.plan import Mesh
from te_overrides.kernels.zigzag.reference import rank_positions

SEED = 1234


def _random(shape: tuple[int, ...], seed: int, device: str, scale: float) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(SEED + seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(torch.bfloat16)


@functools.lru_cache(maxsize=1)
def whole_weights(hidden: int, intermediate: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[gate; up]`` [2 I, H] and down [H, I], bf16."""
    return (
        _random((2 * intermediate, hidden), 1, device, hidden**-0.5),
        _random((hidden, intermediate), 2, device, intermediate**-0.5),
    )


def tokens(rows: int, hidden: int, device: str, micro_batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the output's gradient of one micro-batch, [rows, H] bf16."""
    seed = 10 + 2 * micro_batch
    return _random((rows, hidden), seed, device, 1.0), _random((rows, hidden), seed + 1, device, 1.0)


def enter(mesh: Mesh) -> None:
    """Point Megatron's parallel state at the current world, cut as `mesh` says."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp, context_parallel_size=mesh.cp
    )


def tp_rank() -> int:
    return int(parallel_state.get_tensor_model_parallel_rank())


def cp_rank() -> int:
    return int(parallel_state.get_context_parallel_rank())


def mine(x: torch.Tensor, mesh: Mesh, split: bool) -> torch.Tensor:
    """This rank's rows of [rows, C]: its positions under CP, of those its share over TP if `split`."""
    if mesh.cp > 1:
        x = x[rank_positions(x.shape[0], mesh.cp, cp_rank(), CP_LAYOUT).to(x.device)]
    return x.chunk(mesh.tp)[tp_rank()] if split else x


def shard_of_first(whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This rank's rows of a packed ``[gate; up]`` tensor: each half is cut."""
    return torch.cat([half.chunk(mesh.tp)[tp_rank()] for half in whole.chunk(2)])


def shard_of_second(whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This rank's columns of a down projection."""
    return whole.chunk(mesh.tp, dim=1)[tp_rank()]


def build(mesh: Mesh, hidden: int, intermediate: int, device: str) -> Any:
    """The module of this rank."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=intermediate,
        num_attention_heads=8,
        num_query_groups=8,
        tensor_model_parallel_size=mesh.tp,
        context_parallel_size=mesh.cp,
        sequence_parallel=mesh.sp,
        params_dtype=torch.bfloat16,
        bf16=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        # Weights are filled below; made on the host, they need no generator of a GPU.
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    submodules = MLPSubmodules(
        linear_fc1=DeterministicColumnParallelLinear, linear_fc2=DeterministicRowParallelLinear
    )
    module: Any = DeterministicMLP(
        config, submodules, tp_group=parallel_state.get_tensor_model_parallel_group()
    )
    module.to(device)
    first, second = whole_weights(hidden, intermediate, device)
    with torch.no_grad():
        module.linear_fc1.weight.copy_(shard_of_first(first, mesh))
        module.linear_fc2.weight.copy_(shard_of_second(second, mesh))
    return module


def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """[rows, H] to [rows, H], as one sequence."""
    out: torch.Tensor = module(x.unsqueeze(1))[0].squeeze(1)
    return out


def training_pass(module: Any, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, dHidden) of one micro-batch; weight gradients go where the configuration says."""
    leaf = x.clone().requires_grad_()
    out = forward(module, leaf)
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def accumulate(module: Any, fused: bool) -> None:
    """Forget weight gradients; `fused`: add the next ones to a float32 ``main_grad``, as Megatron's fusion does."""
    module.config.gradient_accumulation_fusion = fused
    for weight in (module.linear_fc1.weight, module.linear_fc2.weight):
        weight.grad = None
        if fused:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)


def weight_gradients(module: Any, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[gate; up]`` and down, this rank's shard."""
    first, second = module.linear_fc1.weight, module.linear_fc2.weight
    return (first.main_grad, second.main_grad) if fused else (first.grad, second.grad)
