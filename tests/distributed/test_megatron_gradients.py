"""From gradients to weights: Megatron's data-parallel wrapper, finalization, clipping and (distributed) Adam.

For every data-parallel degree there is one result: whatever TP, CP, SP and PP are, whatever bucket a gradient lies in,
overlapped or not, with a distributed optimizer or without. Three micro-batches a step, other tokens on every
data-parallel rank, two steps.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits
from procs import run_ranks

ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("megatron_cpu.armed_megatron", "megatron.core.models.gpt", "megatron.core.optimizer"),
}
SPEC = ["megatron_plugins.layer_specs", "deterministic_gpt_layer_spec"]
SEQUENCE, MICRO_BATCHES, STEPS, VOCABULARY = 64, 3, 2, 1024
BF16, FP32 = torch.bfloat16, torch.float32
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5000}
SHARDED = {"use_distributed_optimizer": True}


@dataclass(frozen=True)
class Run:
    """Degrees, dtypes of weights and gradient buffers, and what is passed to the wrapper."""

    dp: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dtype: torch.dtype = BF16
    buffer: torch.dtype = FP32
    layers: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[int, int, torch.dtype, torch.dtype]:
        """Runs of one kind have one result."""
        return self.dp, self.layers, self.dtype, self.buffer

    def __str__(self) -> str:
        dtypes = f"{self.dtype} weights, {self.buffer} buffers".replace("torch.", "")
        degrees = f"DP{self.dp}xTP{self.tp}{'+SP' * (self.tp > 1)}xCP{self.cp}xPP{self.pp}"
        return f"{degrees}, {dtypes}, {self.layers} layers, {', '.join(self.config) or 'plain'}"


RUNS = {
    1: [Run(1), Run(1, config={**SHARDED, **OVERLAP})],
    2: [Run(2), Run(2, buffer=BF16), Run(2, dtype=FP32), Run(2, layers=2)],
    4: [
        Run(1, tp=2, cp=2),
        Run(2, cp=2, buffer=BF16),
        Run(2, tp=2, buffer=BF16, config={**SHARDED, **OVERLAP}),
        Run(2, cp=2, dtype=FP32, config={**SHARDED, **OVERLAP}),
        Run(2, pp=2, layers=2),
        Run(4),
        Run(4, config={**SHARDED, **OVERLAP}),
        Run(4, buffer=BF16, config=SHARDED),
        Run(4, buffer=BF16, config=OVERLAP),
    ],
    8: [Run(2, tp=2, cp=2), Run(4, cp=2, config=SHARDED)],
}


def _config(run: Run) -> Any:
    import small_model

    small_model.SEQUENCE, small_model.BATCH, small_model.LAYERS = SEQUENCE, 1, run.layers
    layout = small_model.layout_of(run.tp, run.cp, run.tp > 1)
    config = small_model.config_for(layout, run.dtype)
    config.pipeline_model_parallel_size = run.pp
    return layout, config


def _owned(tensor: torch.Tensor, group: Any, what: str) -> int:
    """Assert that every element is held by at most one rank of `group`, and that nobody holds a -0: then a sum is exact
    in any order. Returns the number of elements that somebody holds."""
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, tensor, group=group)
    holders = torch.stack([part != 0 for part in everybody]).sum(0)
    assert int(holders.max()) <= 1, f"{what}: {int((holders > 1).sum())} elements have two owners"
    assert not any(bool((torch.signbit(part) & (part == 0)).any()) for part in everybody), f"{what}: -0"
    return int(holders.sum())


@contextmanager
def _one_owner_each(what: str, seen: list[int]) -> Any:
    """While it lasts, every all-reduce adds elements with one owner."""
    all_reduce = torch.distributed.all_reduce

    def checked(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        seen.append(_owned(tensor, group, what))
        return all_reduce(tensor, *args, group=group, **kwargs)

    torch.distributed.all_reduce = checked
    try:
        yield
    finally:
        torch.distributed.all_reduce = all_reduce


def _whole_gradients(ddp: Any, run: Run, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Gradients as the optimizer is to see them: bucket shards and tensor-parallel shards put together."""
    from megatron.core import parallel_state

    import small_model

    group = parallel_state.get_tensor_model_parallel_group()
    if run.config.get("use_distributed_optimizer"):
        for bucket_group in ddp.bucket_groups:
            within = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                shard = bucket.grad_data.chunk(within.size())[within.rank()].clone()
                parts = [torch.empty_like(shard) for _ in range(within.size())]
                dist.all_gather(parts, shard, group=within)
                bucket.grad_data.copy_(torch.cat(parts))
    out = {}
    for name, parameter in ddp.module.named_parameters():
        value = parameter.main_grad.detach().clone()
        if run.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            value = small_model.unshard(name, small_model.gather(value, group), parameter.partition_dim)
        out[names[name]] = value
    return out


def train(run: Run) -> dict[str, Any]:
    """Gradient norms, whole gradients of every step, whole weights after the last; what `_one_owner_each` saw."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    import pretrain_small
    import small_model
    from megatron_plugins.collectives import gradient_buckets
    from megatron_plugins.verify.model import build as building

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(run.tp, run.pp, context_parallel_size=run.cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layout, config = _config(run)
    inner = pretrain_small.build(SimpleNamespace(spec=SPEC), config)
    model = Float16Module(config, inner) if run.dtype is BF16 else inner
    prefix = "module." if run.dtype is BF16 else ""
    names = {prefix + n: building.global_name(inner, n) for n, _ in inner.named_parameters()}
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=run.buffer is FP32, **run.config)
    ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=1.0,
            bf16=run.dtype is BF16,
            params_dtype=run.dtype,
            use_distributed_optimizer=bool(run.config.get("use_distributed_optimizer")),
        ),
        [ddp],
    )
    out: dict[str, Any] = {"norms": [], "gradients": [], "owned": [], "embedding": [], "over CP": []}
    sums = {name: getattr(gradient_buckets, name) for name in ("start_gradient_sums", "add_gradients")}

    def checked_over_cp(add: Any, buckets: Any, *args: Any, **kwargs: Any) -> Any:
        if run.cp > 1:
            cp_group = parallel_state.get_context_parallel_group()
            out["over CP"] += [_owned(bucket, cp_group, "gradients over CP") for bucket in buckets]
        return add(buckets, *args, **kwargs)

    finalization = sys.modules["megatron.core.distributed.finalize_model_grads"]
    over_tp, over_pp = (
        finalization._allreduce_non_tensor_model_parallel_grads,
        finalization._allreduce_embedding_grad,
    )

    def finalize(*args: Any, **kwargs: Any) -> None:
        def checked_over_tp(*a: Any, **k: Any) -> None:
            if run.config.get("use_distributed_optimizer"):
                return over_tp(*a, **k)  # beside its shard a rank holds sums that nobody finished
            with _one_owner_each("norm gradients over TP", out["owned"]):
                return over_tp(*a, **k)

        def checked_over_pp(*a: Any, **k: Any) -> None:
            with _one_owner_each("embedding gradients over PP", out["embedding"]):
                return over_pp(*a, **k)

        finalization._allreduce_non_tensor_model_parallel_grads = checked_over_tp
        finalization._allreduce_embedding_grad = checked_over_pp
        try:
            finalization.finalize_model_grads(*args, **kwargs)
        finally:
            finalization._allreduce_non_tensor_model_parallel_grads = over_tp
            finalization._allreduce_embedding_grad = over_pp
        out["gradients"].append(_whole_gradients(ddp, run, names))

    config.finalize_model_grads_func, config.no_sync_func = finalize, ddp.no_sync
    positions = small_model.positions_of(layout)
    mask = ~torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(0, VOCABULARY, (STEPS, MICRO_BATCHES, run.dp, 1, SEQUENCE + 1), generator=generator)

    def forward(iterator: Any, module: Any) -> Any:
        tokens = next(iterator)
        ids, labels = tokens[:, :-1][:, positions], tokens[:, 1:][:, positions]
        losses = module(ids, positions[None].contiguous(), mask, labels=labels.contiguous())

        def per_token(output: torch.Tensor) -> Any:
            return output.float().sum(), torch.tensor(output.numel(), dtype=torch.int), {}

        return losses, per_token

    for batches in data[:, :, parallel_state.get_data_parallel_rank()]:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for name, add in sums.items():
            setattr(gradient_buckets, name, functools.partial(checked_over_cp, add))
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[ddp],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        for name, add in sums.items():
            setattr(gradient_buckets, name, add)
        out["norms"].append(float(optimizer.step()[1]))
    group = parallel_state.get_tensor_model_parallel_group()
    out["weights"] = {}
    for name, parameter in inner.named_parameters():
        value = parameter.detach().clone()
        if run.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            value = small_model.unshard(name, small_model.gather(value, group), parameter.partition_dim)
        out["weights"][names[prefix + name]] = value
    out["buckets"] = sum(len(each.buckets) for each in ddp.bucket_groups)
    return out


def every_run(rank: int, world: int, runs: list[Run]) -> list[dict[str, Any] | None]:
    """What rank 0 and the last rank (another pipeline stage) hold of every run."""
    results = [train(run) for run in runs]
    return results if rank in (0, world - 1) else [None] * len(runs)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Every run, whole: with two pipeline stages the parameters of both."""
    out = {}
    for world, runs in RUNS.items():
        ranks = run_ranks(world, every_run, runs, timeout=150, **ARMED)
        for run, first, last in zip(runs, ranks[0], ranks[-1], strict=True):
            assert first is not None and last is not None and first["norms"] == last["norms"]
            both = zip(first["gradients"], last["gradients"], strict=True)
            out[str(run)] = {
                **first,
                "gradients": [{**a, **b} for a, b in both],
                "weights": {**first["weights"], **last["weights"]},
            }
    return out


ALL = [run for runs in RUNS.values() for run in runs]
FIRST = {run.kind: run for run in reversed(ALL)}


@pytest.mark.parametrize("run", [run for run in ALL if run is not FIRST[run.kind]], ids=str)
def test_gradients_norm_and_weights_are_those_of_the_plain_run(run: Run, results: dict[str, Any]) -> None:
    got, want = results[str(run)], results[str(FIRST[run.kind])]
    assert got["norms"] == want["norms"] and min(want["norms"]) > 1.0, "clipping must take part"
    for step, (mine, plain) in enumerate(zip(got["gradients"], want["gradients"], strict=True)):
        assert mine.keys() == plain.keys()
        for name, gradient in plain.items():
            assert gradient.dtype is run.buffer and bool((gradient != 0).any())
            assert_equal_bits(mine[name], gradient, f"{run}: gradient of {name}, step {step}")
    for name, weight in want["weights"].items():
        assert_equal_bits(got["weights"][name], weight, f"{run}: {name} after {STEPS} steps")


def test_what_was_compared_differs_from_kind_to_kind_and_lay_in_many_buckets(results: dict[str, Any]) -> None:
    kinds = [results[str(run)]["norms"] for run in FIRST.values()]
    assert len({tuple(norms) for norms in kinds}) == len(FIRST)
    assert all(
        (results[str(run)]["buckets"] > 3) is ("bucket_size" in run.config and run.pp == 1) for run in ALL
    )


def test_sums_over_tp_and_cp_have_one_owner_an_element_and_none_is_made_over_pipeline_stages(
    results: dict[str, Any],
) -> None:
    """NVIDIA/Megatron-LM#1446. `_owned` raises in the run; here: that it looked at something."""
    for run in ALL:
        over_cp = results[str(run)]["over CP"]
        assert len(over_cp) == (STEPS * results[str(run)]["buckets"] if run.cp > 1 else 0) and all(over_cp)
        looked = [elements > 0 for elements in results[str(run)]["owned"]]
        assert looked == [True] * (
            STEPS if run.tp > 1 and not run.config.get("use_distributed_optimizer") else 0
        )
        assert results[str(run)]["embedding"] == []
