"""Ranks execute their share and exchange operands: work and bytes of the parallel linears equal closed formulas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
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


class Moving:
    """An exchange under way that records when it is waited for."""

    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


@contextmanager
def recorded(cp_group: Any) -> Iterator[list[str]]:
    """Exchanges over context-parallel ranks and gradients' products of the linears, in the order they are called."""
    from megatron_plugins.collectives import ownership
    from megatron_plugins.modules import input_gradient, linear
    from te_overrides.kernels.collectives import transport

    events: list[str] = []

    def exchange(name: str, original: Any) -> Any:
        def start(*arguments: Any, group: Any, **keywords: Any) -> Any:
            work = original(*arguments, group=group, **keywords)
            if group is not cp_group:
                return work
            events.append(f"start {name}")
            return Moving(work, name, events)

        return start

    def product(name: str, original: Any) -> Any:
        def multiply(*arguments: Any, **keywords: Any) -> Any:
            events.append(name)
            return original(*arguments, **keywords)

        return multiply

    with pytest.MonkeyPatch.context() as patch:
        gather, swap = transport._all_gather_bytes, transport.dist.all_to_all_single
        patch.setattr(transport, "_all_gather_bytes", exchange("x", gather))
        patch.setattr(transport.dist, "all_to_all_single", exchange("grad", swap))
        patch.setattr(ownership, "one_lane", product("dW", ownership.one_lane))
        patch.setattr(linear, "one_lane", product("dX", linear.one_lane))
        patch.setattr(input_gradient, "lane_tree", product("dX", input_gradient.lane_tree))
        yield events


def count_linears(rank: int, world: int, cp: int, sp: bool) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Work and traffic of one column- and one row-parallel linear, forward and backward; events of the backward.

    The events are those of an FFN, too.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import patches.auto  # noqa: F401
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.mlp import MLPSubmodules

    from megatron_plugins.modules.linear import (
        DeterministicColumnParallelLinear,
        DeterministicRowParallelLinear,
    )
    from megatron_plugins.modules.mlp import DeterministicMLP
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
    out, events = {}, {}
    config = common["config"]
    tp_group, cp_group = parallel_state.get_tensor_model_parallel_group(), column.layout.cp_group
    linears = MLPSubmodules(
        linear_fc1=DeterministicColumnParallelLinear, linear_fc2=DeterministicRowParallelLinear
    )
    ffn = DeterministicMLP(config, linears, tp_group=tp_group)
    for name, layer, shape in (
        ("column", column, (local // tp if sp else local, B, K)),
        ("row", row, (local, B, K // tp)),
    ):
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        with accounting.count() as forward:
            y, _ = layer(x)
        with accounting.count() as backward:
            with recorded(cp_group) as events[name]:
                y.backward(torch.ones_like(y))
        for part, counter in (("forward", forward), ("backward", backward)):
            out[f"{name} {part}"] = (counter.flops, counter.total_bytes_sent)
    x = torch.randn(
        local // tp if sp else local, B, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
    )
    y, _ = ffn(x)
    with recorded(cp_group) as events["ffn"]:
        y.backward(torch.ones_like(y))
    return out, events


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


def test_work_and_traffic_of_the_linears_equal_the_formulas_and_operands_travel_meanwhile() -> None:
    for world, cp, sp in ((1, 1, False), (2, 1, False), (4, 1, True), (4, 4, False), (8, 2, True)):
        want = _expected(world // cp, cp, sp)
        for rank, (got, events) in enumerate(run_ranks(world, count_linears, cp, sp, **ARMED)):
            assert got == want, f"world {world}, CP {cp}, SP {sp}, rank {rank}"
            # Operands of dW travel under context parallelism, and while dX is computed.
            one = ["start grad", "start x", "dX", "wait grad", "wait x", "dW"] if cp > 1 else ["dX"]
            for name, seen in events.items():
                assert seen == one * (2 if name == "ffn" else 1), (
                    f"{name}, world {world}, CP {cp}, rank {rank}"
                )
