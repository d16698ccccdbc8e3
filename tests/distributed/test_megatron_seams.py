"""Sums that upstream's own modules make over ranks, release by release: the tree, in every form and at every seam."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import test_gradient_buckets as buckets
import torch
import torch.distributed as dist

from bits import assert_equal_bits
from procs import run_ranks
from te_overrides.kernels.tree.reference import balanced_tree
from upstream_wheels import MEGATRON_CORE, sources

WORLD = 4
SIZES = ((8, 3, 5), (16, 1, 9), (8, 3, 5))


def _data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(dtype)


def _tree(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return balanced_tree([_data(rank, shape, dtype, seed) for rank in range(WORLD)])


def _mappings(rank: int, group: Any) -> None:
    """Every autograd region that adds, forward or backward, sizes changed between calls."""
    from megatron.core.tensor_parallel import mappings

    for shape in SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            x, want = _data(rank, shape, dtype), _tree(shape, dtype)
            own = want.chunk(WORLD)[rank]
            got = mappings.reduce_from_tensor_model_parallel_region(x.clone(), group=group)
            assert_equal_bits(got, want, f"reduce {shape} {dtype}")
            strided = torch.stack([x, x], dim=-1)[..., 0]
            assert_equal_bits(
                mappings._reduce(strided, group), want, f"reduce of a strided tensor {shape} {dtype}"
            )
            got = mappings.reduce_scatter_to_sequence_parallel_region(x, group=group)
            assert_equal_bits(got, own, f"reduce-scatter {shape} {dtype}")
            got = mappings.reduce_scatter_to_sequence_parallel_region(x, group=group, use_global_buffer=True)
            assert_equal_bits(got, own, f"reduce-scatter into the global buffer {shape} {dtype}")
            leaf = torch.zeros_like(x, requires_grad=True)
            mappings.copy_to_tensor_model_parallel_region(leaf, group=group).backward(x.clone())
            assert leaf.grad is not None
            assert_equal_bits(leaf.grad, want, f"backward of copy {shape} {dtype}")
            part = torch.zeros_like(own, requires_grad=True)
            mappings.gather_from_sequence_parallel_region(part, group=group).backward(x)
            assert part.grad is not None
            assert_equal_bits(part.grad, own, f"backward of gather {shape} {dtype}")
    x, splits = _data(rank, (11, 3), torch.float32), [2, 5, 0, 4]
    got = mappings.reduce_scatter_to_sequence_parallel_region(x, group=group, input_split_sizes=splits)
    assert_equal_bits(
        got, _tree((11, 3), torch.float32).split(splits)[rank], "reduce-scatter in unequal parts"
    )
    x = _data(rank, (6, 4 * WORLD), torch.float32)
    got = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(x, group=group)
    assert_equal_bits(
        got, _tree((6, 4 * WORLD), torch.float32).chunk(WORLD, -1)[rank], "along the last dimension"
    )


def _linears(rank: int, group: Any) -> None:
    """The input gradient of upstream's column-parallel layers: this rank's product, then the tree over ranks."""
    from megatron.core.tensor_parallel import layers

    for tokens, sequence_parallel, frozen in ((8, False, False), (12, True, False), (8, False, True)):
        inputs, outputs = 16, 24
        weight = _data(rank, (outputs, inputs), torch.float32, seed=1).requires_grad_(not frozen)
        length = tokens // WORLD if sequence_parallel else tokens
        x = torch.ones(length, 2, inputs, requires_grad=True)
        grad = _data(rank, (tokens, 2, outputs), torch.float32, seed=2)
        forward = (
            layers.linear_with_frozen_weight
            if frozen
            else layers.linear_with_grad_accumulation_and_async_allreduce
        )
        out = forward(
            x, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=not sequence_parallel,
            sequence_parallel=sequence_parallel, tp_group=group,
        )  # fmt: skip
        for again in (True, False):
            x.grad = None
            out.backward(grad, retain_graph=again)
            assert x.grad is not None
            parts = [torch.empty(tokens, 2, inputs) for _ in range(WORLD)]
            dist.all_gather(parts, grad.matmul(weight.detach()), group=group)
            want = balanced_tree(parts)
            what = f"input gradient, SP {sequence_parallel}, frozen {frozen}, graph kept {again}"
            assert_equal_bits(x.grad, want.chunk(WORLD)[rank] if sequence_parallel else want, what)


def seams(rank: int, world: int, cases: dict[str, Any]) -> dict[str, Any]:
    """All of it, after the data-parallel buckets; what the ledger says of every override here."""
    from megatron.core.distributed import DistributedDataParallelConfig

    import patches
    from patches import gate

    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    if buckets.WIDE in known:  # 0.16 on, as is the forced all-reduce
        bf16: dict[str, Any] = {"dtype": torch.bfloat16, "fp32_buffer": False}
        cases["float32 accumulation"] = buckets.Case(
            **bf16, config={**buckets.SHARDED, buckets.WIDE: True, **buckets.OVERLAP}
        )
        cases["forced all-reduce"] = buckets.Case(config={**buckets.SHARDED, **buckets.OVERLAP}, force=True)
        if buckets.LOCAL_FP32 in known:  # 0.17 on
            cases["float32 gradients"] = buckets.Case(
                **bf16, config={buckets.LOCAL_FP32: ("all",), **buckets.OVERLAP}
            )
    buckets.every_case(rank, world, cases)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    group = parallel_state.get_tensor_model_parallel_group()
    _mappings(rank, group)
    _linears(rank, group)
    ledger = patches.current_ledger()
    assert ledger is not None
    gate.settle(ledger)
    names = ("gradient_buckets", "tensor_parallel.", "linear.", "frozen_linear.")
    return {
        id: (entry.state, entry.called)
        for id, entry in ledger.entries.items()
        if id.removeprefix("megatron.").startswith(names)
    }


@pytest.mark.parametrize("version", MEGATRON_CORE)
def test_upstreams_modules_add_in_the_order_of_the_tree(version: str) -> None:
    """Buckets, mappings and linear layers of every release, on four ranks; every replacement verified and called."""
    environment = {
        "DETERMINISTIC_ROCM": "invariant",
        "MEGATRON_SOURCES": str(sources(version, "megatron-core")),
    }
    cases = {
        name: case
        for name, case in buckets._named(WORLD, 1, torch.bfloat16, True).items()
        if name.endswith(("tiny buckets", ": sharded", "overlap, small buckets"))
    }
    for report in run_ranks(WORLD, seams, cases, env=environment, imports=("megatron_cpu.armed_megatron",)):
        assert len(report) == 6 and set(report.values()) == {("VERIFIED", True)}, report
