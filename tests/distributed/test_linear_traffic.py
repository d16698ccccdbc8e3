"""Ranks execute their share and exchange operands: work and bytes of the parallel linears equal closed formulas."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
# Armed and imported once for all ranks of a world, before they are forked.
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
S, B, K, N = 64, 2, 32, 48
ELEMENT = 2  # bytes of bf16


def count_linears(rank: int, world: int, cp: int, sp: bool) -> dict[str, Any]:
    """Work and traffic of one column- and one row-parallel linear, forward and backward."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import patches.auto  # noqa: F401
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_plugins.modules.linear import (
        DeterministicColumnParallelLinear,
        DeterministicRowParallelLinear,
    )
    from small_model import config_for, layout_of
    from te_overrides.kernels import accounting

    tp = world // cp
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    common: dict[str, Any] = {
        "config": config_for(layout_of(tp, cp, sp), torch.bfloat16),
        "init_method": torch.nn.init.normal_,
        "bias": False,
        "skip_bias_add": True,
    }
    column = DeterministicColumnParallelLinear(K, N, gather_output=False, **common)
    row = DeterministicRowParallelLinear(K, N, input_is_parallel=True, **common)
    local = S // cp
    out = {}
    for name, layer, shape in (
        ("column", column, (local // tp if sp else local, B, K)),
        ("row", row, (local, B, K // tp)),
    ):
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        with accounting.count() as forward:
            y, _ = layer(x)
        with accounting.count() as backward:
            y.backward(torch.ones_like(y))
        for part, counter in (("forward", forward), ("backward", backward)):
            out[f"{name} {part}"] = (counter.flops, counter.total_bytes_sent)
    return out


def _expected(tp: int, cp: int, sp: bool) -> dict[str, tuple[int, int]]:
    tokens = S * B // cp  # of one CP rank
    gemm = tokens * K * N // tp
    # An all-gather sends one's own piece to everybody else; a reduce-scatter sends everybody else's piece once.
    gather_x = (tokens // tp * K if sp else 0) * (tp - 1)
    reduce_x = tokens * K * (tp - 1) // (tp if sp else 1)
    reduce_y = tokens * N * (tp - 1) // (tp if sp else 1)
    gather_y = (tokens // tp * N if sp else 0) * (tp - 1)
    column_dw = tokens * K * (cp - 1) + tokens * (N // tp) * (cp - 1) // cp
    row_dw = tokens * (K // tp) * (cp - 1) + tokens * N * (cp - 1) // cp
    return {
        "column forward": (gemm, gather_x * ELEMENT),
        # Upstream gathers the tokens again for dW, too.
        "column backward": (2 * gemm, (reduce_x + gather_x + column_dw) * ELEMENT),
        "row forward": (gemm, reduce_y * ELEMENT),
        "row backward": (2 * gemm, (gather_y + row_dw) * ELEMENT),
    }


def test_work_and_traffic_of_the_linears_equal_the_formulas() -> None:
    for world, cp, sp in ((1, 1, False), (2, 1, False), (4, 1, True), (4, 4, False), (8, 2, True)):
        want = _expected(world // cp, cp, sp)
        for rank, got in enumerate(run_ranks(world, count_linears, cp, sp, **ARMED)):
            assert got == want, f"world {world}, CP {cp}, SP {sp}, rank {rank}"
