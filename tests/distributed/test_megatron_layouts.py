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
# Armed and imported once for all ranks of a world, before they are forked.
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
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
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import patches.auto  # noqa: F401
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import small_model

    small_model.GROUPS, small_model.SEQUENCE = 8, length
    return small_model


def run_layouts(
    rank: int, world: int, length: int, names: list[tuple[str, int, int, bool]]
) -> dict[str, Any]:
    """On every rank: whole logits, log-probs, loss and gradients of each layout after two micro-batches, and
    work done."""
    small_model = _prepare(length)
    from te_overrides.kernels import accounting

    out = {}
    tokens = small_model.byte_tokens(ROOT / "docs", 2)
    for name, tp, cp, sp in names:
        layout = small_model.layout_of(tp, cp, sp)
        small_model.initialize(layout)
        model = small_model.build(layout, torch.bfloat16)
        with accounting.count() as counter:
            results = small_model.run_model(model, layout, tokens)
        out[name] = {
            "results": results if rank == 0 else None,
            "flops": counter.flops,
            "bytes": counter.bytes_sent,
        }
    return out


@pytest.fixture(scope="module")
def unsharded() -> dict[int, Any]:
    return {
        length: run_ranks(1, run_layouts, length, LAYOUTS[1], **ARMED)[0]["TP1"]
        for length in {LENGTH.get(world, 256) for world in LAYOUTS}
    }


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_logits_loss_and_every_gradient_do_not_depend_on_the_layout(
    world: int, unsharded: dict[int, Any]
) -> None:
    length = LENGTH.get(world, 256)
    want = unsharded[length]
    ranks = run_ranks(world, run_layouts, length, LAYOUTS[world], timeout=240, **ARMED)
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
        # Never more than the unsharded job; less where a rank's tiles happen to hold fewer hidden pairs.
        assert 0.95 * want["flops"] <= sum(work) <= want["flops"], (
            f"{name}: {sum(work)} against {want['flops']}"
        )
        assert max(work) <= 1.05 * want["flops"] / world, (
            f"{name}: one rank executes {max(work)} of {want['flops']}"
        )


def run_compiled_and_packed(rank: int, world: int) -> dict[str, Any]:
    """One unsharded model: eager, under torch.compile, and with two sequences packed into one row."""
    small_model = _prepare(128)
    from types import SimpleNamespace

    layout = small_model.layout_of()
    small_model.initialize(layout)
    model = small_model.build(layout, torch.bfloat16)
    ids = small_model.byte_tokens(ROOT / "docs", 1)[0, :, :-1]
    positions = torch.arange(ids.shape[1]).expand(2, -1).contiguous()
    mask = ~torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    seen: list[str] = []

    def record(graph: Any, _inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    with torch.no_grad():
        eager = model(ids, positions, mask)
        compiled = torch.compile(model, backend=record)(ids, positions, mask)
        boundaries = torch.tensor([0, ids.shape[1], 2 * ids.shape[1]], dtype=torch.int32)
        packing = SimpleNamespace(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=None,
            max_seqlen_q=ids.shape[1],
            max_seqlen_kv=ids.shape[1],
            local_cp_size=None,
            cp_group=None,
        )
        packed = model(ids.reshape(1, -1), positions.reshape(1, -1), None, packed_seq_params=packing)
    return {"eager": eager, "compiled": compiled, "packed": packed.view(eager.shape), "operations": seen}


def test_an_outer_compile_and_packing_change_no_bit() -> None:
    got = run_ranks(1, run_compiled_and_packed, **ARMED)[0]
    assert_equal_bits(got["compiled"], got["eager"], "logits under torch.compile")
    assert_equal_bits(got["packed"], got["eager"], "logits of packed sequences")
    # What the compiler was given holds none of the chains, which take thousands of operations.
    assert len(got["operations"]) < 500, got["operations"]
