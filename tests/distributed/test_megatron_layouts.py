"""A whole megatron-core GPT, forward and backward, has the same bits in layouts beyond the quick start's.

NVIDIA/Megatron-LM#1736 and pytorch/torchtitan#1750: TP=1 and TP=2 disagree in loss and weight gradients.
NVIDIA/Megatron-LM#1446: norm gradients differ under sequence parallelism.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    1: [("TP1", 1, 1, False)],
    2: [("TP2+SP", 2, 1, True), ("CP2", 1, 2, False)],
    3: [("CP3", 1, 3, False)],
    4: [("TP4+SP", 4, 1, True), ("TP2xCP2", 2, 2, False)],
    8: [("TP8+SP", 8, 1, True), ("CP8", 1, 8, False), ("TP4xCP2+SP", 4, 2, True), ("TP2xCP4+SP", 2, 4, True)],
}
# 96 positions: CP3 needs whole granules of 16 in each of 2 * 3 chunks; the others run 256.
LENGTH = {3: 96}


def _prepare(length: int) -> Any:
    """Arm, import Megatron, and set the small model to eight KV groups so that TP=8 exists."""
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
    import megatron_on_cpu
    import patches.auto  # noqa: F401

    megatron_on_cpu.install()
    import step0_model

    step0_model.GROUPS, step0_model.SEQUENCE = 8, length
    return step0_model


def run_layouts(
    rank: int, world: int, length: int, names: list[tuple[str, int, int, bool]]
) -> dict[str, Any]:
    """On every rank: whole logits, log-probs, loss and gradients of each layout after two micro-batches, and "
    "work done."""
    step0_model = _prepare(length)
    from megatron.core import parallel_state

    import step0_engine
    from te_overrides.kernels import accounting

    out = {}
    tokens = step0_model.byte_tokens(ROOT / "docs", 2)
    for name, tp, cp, sp in names:
        layout = step0_model.Layout(name, tp, cp, sp)
        step0_model.initialize(layout)
        model = step0_model.build(layout, torch.bfloat16, step0_engine._spec("deterministic"))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                full = list(parameter.shape)
                sharded = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
                if sharded:
                    full[parameter.partition_dim] *= tp
                value = torch.randn(full, generator=generator) * 0.1 + ("norm" in parameter_name)
                tp_rank = parallel_state.get_tensor_model_parallel_rank()
                parameter.copy_(step0_model._shard(parameter_name, value, parameter, tp, tp_rank))
        with accounting.count() as counter:
            results = step0_engine._run_model(model, layout, tokens, step0_engine._functions("deterministic"))
        out[name] = {
            "results": results[2] if rank == 0 else None,
            "flops": counter.flops,
            "bytes": counter.bytes_sent,
        }
    return out


@pytest.fixture(scope="module")
def unsharded() -> dict[int, Any]:
    return {
        length: run_ranks(1, run_layouts, length, LAYOUTS[1], env={"DETERMINISTIC_ROCM": "invariant"})[0][
            "TP1"
        ]
        for length in {LENGTH.get(world, 256) for world in LAYOUTS}
    }


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_logits_loss_and_every_gradient_do_not_depend_on_the_layout(
    world: int, unsharded: dict[int, Any]
) -> None:
    length = LENGTH.get(world, 256)
    want = unsharded[length]
    ranks = run_ranks(
        world, run_layouts, length, LAYOUTS[world], timeout=240, env={"DETERMINISTIC_ROCM": "invariant"}
    )
    for name, _tp, _cp, _sp in LAYOUTS[world]:
        got = ranks[0][name]["results"]
        for what in ("logits", "logprobs", "loss"):
            assert_equal_bits(got[what], want["results"][what], f"{name}: {what}")
        for parameter, gradient in want["results"]["gradients"].items():
            assert_equal_bits(got["gradients"][parameter], gradient, f"{name}: gradient of {parameter}")
        work = [rank[name]["flops"] for rank in ranks]
        print(
            f"{name}: multiply-adds a rank {work}, unsharded {want['flops']}; bytes sent {ranks[0][name]['bytes']}"
        )
        assert sum(work) == want["flops"], (
            f"{name}: ranks execute {sum(work)} multiply-adds, the job has {want['flops']}"
        )
        assert max(work) <= 1.05 * want["flops"] / world, (
            f"{name}: one rank executes {max(work)} of {want['flops']}"
        )
