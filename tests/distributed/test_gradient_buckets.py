"""Gradient buckets: upstream's own data-parallel wrapper around parameters of odd sizes, real backward passes.

A gradient is a constant that the test chooses, so every sum is known: micro-batch by micro-batch in the buffer's dtype,
scaled, then the balanced tree over data-parallel ranks. Under context parallelism each element has one owner.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits, count_mismatches
from fake_streams import FakeStreams
from megatron_plugins.collectives import gradient_sums
from megatron_plugins.collectives.gradient_sums import Mesh, mesh_of
from patches.errors import NotCoveredError
from procs import run_ranks
from te_overrides.kernels.tree.reference import balanced_tree

ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("megatron_cpu.armed_megatron",),
}
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
LOCAL_FP32 = "param_name_patterns_for_fp32_local_accumulation"
WIDE = "reduce_scatter_with_fp32_accumulation"


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
    accumulated = torch.float32 if LOCAL_FP32 in case.config else buffer
    terms = []
    for dp in range(dp_size):
        total = torch.zeros(SHAPES[name], dtype=accumulated)
        for micro in range(MICRO_BATCHES):
            total += constant(step, micro, name, dp, 0, 1, case.dtype)
        total = total.to(buffer)
        terms.append(total if case.cp > 1 else total * (1.0 / dp_size))
    if WIDE in case.config:
        return balanced_tree([term.float() for term in terms]).to(buffer)
    return balanced_tree(terms).to(accumulated)


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
    ddp.force_all_reduce = case.force  # read by upstream's hooks
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


def _mixed_cases() -> dict[str, Case]:
    """What upstream combines with gradients in 16 bits, and optimizer instances."""
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "fp32_buffer": False}
    wide = {**SHARDED, WIDE: True}
    two: dict[str, Any] = {"instances": 2}
    return {
        "float32 accumulation": Case(**bf16, config=wide),
        "float32 accumulation, overlap": Case(**bf16, config={**wide, **OVERLAP}),
        "float32 accumulation, all-reduce": Case(**bf16, config=wide, force=True),
        "instances": Case(**bf16, **two, config=SHARDED),
        "instances, overlap, small buckets": Case(**two, config={**SHARDED, **OVERLAP, "bucket_size": 300}),
        "instances, average": Case(**two, config={**SHARDED, "average_in_collective": True}),
        "instances, CP2": Case(cp=2, **two, config=SHARDED),
        "instances of two": Case(instances=4, config=SHARDED),
    }


@pytest.mark.parametrize(("world", "cps"), [(4, (1, 2)), (8, (1, 2))], ids=["4", "8"])
def test_a_gradient_is_the_tree_over_data_parallel_ranks_in_every_bucket(
    world: int, cps: tuple[int, ...]
) -> None:
    cases: dict[str, Case] = {}
    for cp, fp32_buffer in itertools.product(cps, (True, False) if world == 4 else (False,)):
        cases |= _named(world, cp, torch.bfloat16, fp32_buffer)
    cases |= _named(world, cps[-1], torch.float32, True)
    if world == 8:
        cases |= _mixed_cases()
    reports = run_ranks(world, every_case, cases, **ARMED)
    assert all(report == reports[0] for report in reports)
    counts = {name: count for name, count in reports[0].items() if "buckets" in name}
    assert counts and min(counts.values()) > 1 and max(counts.values()) == len(SHAPES), counts
    assert {count for name, count in reports[0].items() if name not in counts} == {1}


def _differing(world: int) -> tuple[int, int]:
    """Elements of all gradients that differ from the tree's, in one step with tiny buckets: (differing, all)."""
    case = Case(config={**OVERLAP, "bucket_size": 1})
    (got, _), _buckets = run_case(case)
    counts = [
        count_mismatches(gradient, expected(0, name, case, world))[:2] for name, gradient in got.items()
    ]
    return sum(differ for differ, _ in counts), sum(total for _, total in counts)


@contextmanager
def small_pieces() -> Iterator[None]:
    """Whole buckets travel in pieces of at most 100 elements."""
    whole, gradient_sums.PIECE = gradient_sums.PIECE, 100
    yield
    gradient_sums.PIECE = whole


def _upstream(rank: int, world: int) -> tuple[int, int]:
    return _differing(world)


def _changed(rank: int, world: int) -> tuple[tuple[int, int], int, list[bool]]:
    """Mismatches with a chain in place of the tree; most bucket groups under way at once; for each sum whether its
    call returned before it was finished."""
    from megatron_plugins.collectives import gradient_buckets
    from te_overrides.kernels.collectives import reference

    counts, asynchronous = [], []
    started, tree = gradient_buckets._started, reference.balanced_tree

    def spy(sums: Any) -> Any:
        handle = started(sums)
        counts.append(len(gradient_buckets._under_way))
        asynchronous.extend(each._finish is not None for each in sums)
        return handle

    gradient_buckets._started = spy
    assert _differing(world)[0] == 0
    gradient_buckets._started = started
    with small_pieces():
        every_case(rank, world, {"plain": Case(), "sharded": Case(config=SHARDED)})
    reference.balanced_tree = lambda terms: functools.reduce(torch.add, terms)
    chain = _differing(world)
    reference.balanced_tree = tree
    return chain, max(counts), asynchronous


def test_another_order_would_be_noticed_and_overlap_is_overlap() -> None:
    """The check of this file on upstream's own sums and on ours with the order changed; few sums at once under way."""
    upstream = run_ranks(4, _upstream, env={"DETERMINISTIC_ROCM": ""}, imports=ARMED["imports"])
    changed = run_ranks(4, _changed, **ARMED)
    for what, (differ, total) in (("upstream", upstream[0]), ("a chain over ranks", changed[0][0])):
        print(f"{what}: {differ} of {total} elements differ from the tree")
        assert differ > total // 10
    for _, most, asynchronous in changed:
        assert most == 2 and len(asynchronous) == STEPS * len(SHAPES) and all(asynchronous)


def test_a_wait_on_another_stream_waits_for_additions_made_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest sums are finished when newer ones start, on the stream of a backward; upstream waits on its own."""
    from megatron_plugins.collectives import gradient_buckets
    from te_overrides.kernels.collectives.reference import Sum

    streams, added = FakeStreams(), []
    streams.install(monkeypatch)
    streams.current = streams.named("backward")

    def finish() -> list[torch.Tensor]:
        added.append(streams.current.name)
        streams.log.append(("add", None, streams.current.name))
        return [torch.ones(1)]

    monkeypatch.setattr(gradient_buckets, "_under_way", collections.deque())
    oldest, *_ = [gradient_buckets._started([Sum(finish)]) for _ in range(gradient_buckets.UNDER_WAY + 1)]
    assert added == ["backward"]
    assert streams.log == [("add", None, "backward"), ("event", None, "backward")], (
        "the event comes behind the adds"
    )
    oldest.wait()
    assert len(streams.log) == 2, "nothing to wait for on the stream that added"
    streams.current = streams.named("optimizer")
    for _ in range(2):
        streams.log.clear()
        oldest.wait()
        assert streams.log[0] == ("wait", "backward", "optimizer") and added == ["backward"]


def _six_ranks(rank: int, world: int, cases: dict[str, Case]) -> list[str]:
    """Cases with three context-parallel ranks, once more in small pieces; then what is said where three or six
    data-parallel ranks are left."""
    every_case(rank, world, cases)
    with small_pieces():
        every_case(
            rank,
            world,
            {name: case for name, case in cases.items() if name.endswith((": plain", ": sharded"))},
        )
    refused = []
    for cp in (2, 1):
        with pytest.raises(NotCoveredError) as error:
            run_case(Case(cp=cp))
        refused.append(str(error.value))
    return refused


def test_context_parallel_ranks_may_be_any_number_and_data_parallel_ranks_a_power_of_two() -> None:
    cases = {name: case for name, case in _named(6, 3, torch.bfloat16, True).items() if "small" not in name}
    for three, six in run_ranks(6, _six_ranks, cases, **ARMED):
        assert "over 3 data-parallel ranks (a group of 6, context parallelism 2)" in three
        assert "over 6 data-parallel ranks" in six and "degree a power of two" in six


@pytest.mark.parametrize("inner", [True, False], ids=["CP inside DP", "DP inside CP"])
@pytest.mark.parametrize(("dp", "cp"), [(4, 2), (2, 4), (8, 2), (4, 3), (2, 5), (8, 6)])
def test_zeros_of_other_owners_do_not_change_the_tree_over_data_parallel_ranks(
    dp: int, cp: int, inner: bool
) -> None:
    """For powers of two the plain tree over all ranks has the same bits; over 4 x 3 ranks it has not."""
    ranks = list(range(100, 100 + dp * cp))
    mine = ranks[2 * cp : 3 * cp] if inner and dp > 2 else ranks[:cp] if inner else ranks[1::dp]
    mesh = mesh_of(ranks, mine)
    generator = torch.Generator().manual_seed(dp * cp)
    contributions = torch.randn(dp, 1000, generator=generator) * torch.logspace(-4, 4, 1000)
    owner = torch.arange(1000) % cp
    terms: list[torch.Tensor] = [torch.empty(0)] * (dp * cp)
    for d, c in itertools.product(range(dp), range(cp)):
        terms[d * cp + c if inner else c * dp + d] = torch.where(
            owner == c, contributions[d], torch.zeros(())
        )
    want = balanced_tree(list(contributions))
    assert_equal_bits(mesh.add(terms, wide=False), want, f"DP{dp} x CP{cp}: part by part")
    differ = count_mismatches(balanced_tree(terms), want)[0]
    print(f"DP{dp} x CP{cp}, plain tree over all ranks: {differ} of 1000 elements differ")
    if cp & (cp - 1) == 0:
        assert differ == 0
    elif dp > 2 and inner:
        assert differ > 0, "the test cannot tell the two orders apart"


def test_groups_that_form_no_mesh_are_refused() -> None:
    assert mesh_of([4, 5, 6], [4, 5, 6]) == Mesh(((0, 1, 2),))
    with pytest.raises(NotCoveredError, match="neither a run of neighbours nor every 2th"):
        mesh_of([0, 1, 2, 3, 4, 5], [0, 1, 3])


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_a_bucket_are_small_and_hold_every_element_once(ranks: int) -> None:
    bucket = torch.arange(1000)
    own = bucket.chunk(ranks)[1]
    with small_pieces():
        whole = [piece for piece, _ in gradient_sums._pieces(bucket, None, ranks)]
        cut = list(gradient_sums._pieces(bucket, own, ranks))
    assert [x.numel() for x in whole] == [100] * 10 and torch.equal(torch.cat(whole), bucket)
    assert max(piece.numel() for piece, _ in cut) == 100 and len(cut) == 10
    assert torch.equal(torch.cat([piece for piece, _ in cut], dim=1).flatten(), bucket)
    assert torch.equal(torch.cat([part for _, part in cut if part is not None], dim=1)[0], own)
    assert all(part is not None and torch.equal(piece[1:2], part) for piece, part in cut)
