"""Gradient buckets: upstream's own data-parallel wrapper around parameters of odd sizes, real backward passes.

A gradient is a constant that the test chooses, so every sum is known: micro-batch by micro-batch in the buffer's dtype,
scaled, then the balanced tree over data-parallel ranks. Under context parallelism each element has one owner.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits, count_mismatches
from megatron_plugins.collectives.gradient_sums import Mesh, mesh_of
from patches.errors import NotCoveredError
from procs import run_ranks
from te_overrides.kernels.tree.reference import balanced_tree
from upstream_wheels import MEGATRON_CORE, sources

ARMED: dict[str, Any] = {"env": {"DETERMINISTIC_ROCM": "invariant"}, "imports": ("megatron_cpu.armed",)}
SHAPES = {"a": (257,), "b": (5, 7), "c": (64, 33), "d": (1,), "e": (1000,)}
MICRO_BATCHES = 3
STEPS = 2
"""In the first step upstream counts gradients and starts the sums at its end, in the second while they arrive."""


@dataclass(frozen=True)
class Case:
    """One configuration of the wrapper. `instances` of the distributed optimizer, sizes in elements."""

    cp: int = 1
    dtype: torch.dtype = torch.float32
    fp32_buffer: bool = True
    instances: int = 1
    force: bool = False
    config: dict[str, Any] = field(default_factory=dict)


_LAYOUT: list[tuple[int, int]] = []
"""What this rank's groups were made for: making them takes longer than a case."""
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}


@functools.cache
def constant(
    step: int, micro: int, name: str, dp: int, cp: int, cp_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """What rank (dp, cp) contributes to a parameter's gradient; elements of other context-parallel owners are +0."""
    seed = hash((step, micro, dp)) + 1000 * sorted(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed % (1 << 31))
    value = torch.randn(SHAPES[name], generator=generator)
    value = (value * torch.exp(3 * torch.randn(SHAPES[name], generator=generator))).to(dtype)
    owner = torch.arange(value.numel()).view(value.shape) % cp_size
    return torch.where(owner == cp, value, torch.zeros((), dtype=dtype))


def expected(step: int, name: str, case: Case, dp_size: int) -> torch.Tensor:
    """Parameter `name`'s gradient: accumulated, scaled, and added by the tree over data-parallel ranks alone."""
    buffer = torch.float32 if case.fp32_buffer else case.dtype
    terms = []
    for dp in range(dp_size):
        total = torch.zeros(SHAPES[name], dtype=buffer)
        for micro in range(MICRO_BATCHES):
            total += constant(step, micro, name, dp, 0, 1, case.dtype)
        terms.append(total if case.cp > 1 else total * (1.0 / dp_size))
    if case.config.get("reduce_scatter_with_fp32_accumulation"):
        return balanced_tree([term.float() for term in terms]).to(buffer)
    return balanced_tree(terms)


class Toy(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, constants: dict[str, torch.Tensor]) -> torch.Tensor:
        """A number whose gradient is `constants`."""
        return torch.stack([(getattr(self, name) * x).float().sum() for name, x in constants.items()]).sum()


def _wrapped(case: Case) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    if _LAYOUT != [(case.cp, case.instances)]:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            context_parallel_size=case.cp, num_distributed_optimizer_instances=case.instances
        )
        _LAYOUT[:] = [(case.cp, case.instances)]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        context_parallel_size=case.cp,
        calculate_per_token_loss=case.cp > 1,
    )
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.fp32_buffer,
        num_distributed_optimizer_instances=case.instances,
        **case.config,
    )
    return DistributedDataParallel(config=config, ddp_config=ddp_config, module=Toy(case.dtype))


def _gathered(ddp: Any, case: Case) -> dict[str, torch.Tensor]:
    """Whole gradients; where a rank holds a shard of each bucket, the shards put together."""
    if case.config.get("use_distributed_optimizer") and not case.force:
        for group in ddp.bucket_groups:
            within = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = bucket.grad_data.chunk(within.size())[within.rank()].clone()
                parts = [torch.empty_like(shard) for _ in range(within.size())]
                dist.all_gather(parts, shard, group=within)
                bucket.grad_data.copy_(torch.cat(parts))
    return {name: param.main_grad.clone() for name, param in ddp.module.named_parameters()}


def run_case(case: Case) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Whole gradients of every step on this rank, and the number of buckets."""
    from megatron.core import parallel_state

    ddp = _wrapped(case)
    dp, cp = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    out = []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        for micro in range(MICRO_BATCHES):
            constants = {n: constant(step, micro, n, dp, cp, case.cp, case.dtype) for n in SHAPES}
            with ddp.no_sync() if micro + 1 < MICRO_BATCHES else nullcontext():
                ddp(constants).backward()
        ddp.finish_grad_sync(**({"force_all_reduce": True} if case.force else {}))
        out.append(_gathered(ddp, case))
    return out, sum(len(group.buckets) for group in ddp.bucket_groups)


def every_case(rank: int, world: int, cases: dict[str, Case]) -> dict[str, int]:
    """On every rank: each case against the tree; number of buckets a case."""
    import patches

    buckets = {}
    for name, case in cases.items():
        results, buckets[name] = run_case(case)
        for step, got in enumerate(results):
            for parameter, gradient in got.items():
                want = expected(step, parameter, case, world // case.cp)
                assert_equal_bits(gradient, want, f"{name}: {parameter}, step {step}, rank {rank}")
    ledger = patches.current_ledger()
    assert ledger is not None and ledger.entries["megatron.gradient_buckets"].called
    return buckets


def _variants(cp: int, dtype: torch.dtype, fp32_buffer: bool) -> dict[str, Case]:
    kind = {"cp": cp, "dtype": dtype, "fp32_buffer": fp32_buffer}
    out = {
        "plain": Case(**kind),
        "overlap": Case(**kind, config=OVERLAP),
        "overlap, small buckets": Case(**kind, config={**OVERLAP, "bucket_size": 300}),
        "overlap, tiny buckets": Case(**kind, config={**OVERLAP, "bucket_size": 1}),
        "sharded": Case(**kind, config=SHARDED),
        "sharded, overlap": Case(**kind, config={**SHARDED, **OVERLAP}),
        "sharded, overlap, small buckets": Case(**kind, config={**SHARDED, **OVERLAP, "bucket_size": 300}),
        "sharded, all-reduce": Case(**kind, config=SHARDED, force=True),
    }
    if cp == 1:
        out["average"] = Case(**kind, config={"average_in_collective": True})
        out["average, sharded, overlap"] = Case(
            **kind, config={**SHARDED, **OVERLAP, "average_in_collective": True}
        )
    return out


def _named(world: int, cp: int, dtype: torch.dtype, fp32_buffer: bool) -> dict[str, Case]:
    where = f"DP{world // cp}xCP{cp}, {dtype}, {'float32' if fp32_buffer else 'same'} buffer: "
    return {where + name: case for name, case in _variants(cp, dtype, fp32_buffer).items()}


def _check_bucket_counts(buckets: dict[str, int]) -> None:
    counts = {name: count for name, count in buckets.items() if "buckets" in name}
    assert counts and min(counts.values()) > 1 and max(counts.values()) == len(SHAPES), counts
    assert {count for name, count in buckets.items() if name not in counts} == {1}


@pytest.mark.parametrize(("world", "cps"), [(4, (1, 2)), (8, (1, 2, 4)), (6, (3,))], ids=["4", "8", "6"])
def test_a_gradient_is_the_tree_over_data_parallel_ranks_in_every_bucket(
    world: int, cps: tuple[int, ...]
) -> None:
    cases: dict[str, Case] = {}
    for cp, (dtype, fp32) in itertools.product(
        cps, ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True))
    ):
        cases |= _named(world, cp, dtype, fp32)
    reports = run_ranks(world, every_case, cases, **ARMED)
    assert all(report == reports[0] for report in reports)
    _check_bucket_counts(reports[0])
