"""What Megatron's bucket groups do when their gradients are ready: the plumbing of upstream, sums in one order.

Follows ``_ParamAndGradBucketGroup.start_grad_sync`` of 0.14 to 0.19 step by step (its source is pinned); attributes
that came with a version are asked for. ``finish_grad_sync`` stays upstream's: it waits for the handle left here.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from megatron_plugins.collectives.gradient_sums import (
    add_gradients,
    require_consecutive_instances,
    start_gradient_sums,
)
from te_overrides.kernels.collectives.reference import Sum

UNDER_WAY = 2
"""Bucket groups whose bytes may be on their way at once. What arrived needs memory until it is added, so an older group
is finished when a newer one starts; by then it has had the time of a bucket's backward."""

_under_way: collections.deque[GradientHandle] = collections.deque()


class GradientHandle:
    """Sums under way. The results are in the gradient buffer after `wait`.

    `_started` may have waited before upstream does, on another stream: upstream's wait then adds nothing, but its
    stream waits for the additions.
    """

    def __init__(self, sums: Sequence[Sum]) -> None:
        self._sums = sums

    def wait(self) -> None:
        """Add what arrived. On a GPU the current stream waits, not the host."""
        for each in self._sums:
            each.wait_all()


def _started(sums: Sequence[Sum]) -> GradientHandle:
    """A handle for sums that just started; the oldest are finished where too many are under way."""
    handle = GradientHandle(sums)
    _under_way.append(handle)
    while len(_under_way) > UNDER_WAY:
        _under_way.popleft().wait()
    return handle


def _wait_for_replayed_graphs(group: Any) -> None:
    """0.19: a CUDA graph's replay is not ordered with autograd's hooks; its gradients come with an event."""
    events = {
        id(event): event
        for bucket in group.buckets
        for param in bucket.params_list
        if (event := getattr(param, "_cudagraph_wgrad_ready_event", None)) is not None
    }
    for event in events.values():
        torch.cuda.current_stream().wait_event(event)


def _copy_extra_main_grads(group: Any) -> None:
    """0.17 on: gradients that are accumulated in another dtype than they are added in go into the buffer."""
    for bucket in group.buckets:
        for param in getattr(bucket, "params_with_extra_main_grads", ()):
            in_buffer = getattr(param, "main_grad_copy_in_grad_buffer", None)
            if in_buffer is not None:
                in_buffer.copy_(param.main_grad)


def _shards(group: Any) -> list[torch.Tensor]:
    """This rank's part of every bucket, from upstream's own cache."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    size = group.intra_distributed_optimizer_instance_size
    for index, bucket in enumerate(group.buckets):
        if group.cached_grad_buffer_shard_list[index] is None:
            group.cached_grad_buffer_shard_list[index] = shard_buffer(bucket.grad_data, size)
    return [
        shards[group.intra_distributed_optimizer_instance_rank]
        for shards in group.cached_grad_buffer_shard_list
    ]


def _ranks(group: Any, config: Any) -> tuple[Any, Any]:
    """The group that adds, and the group between optimizer instances or None."""
    if not config.use_distributed_optimizer:
        return group.data_parallel_group, None
    inside = group.intra_distributed_optimizer_instance_group
    if config.num_distributed_optimizer_instances == 1:
        return inside, None
    from megatron.core import parallel_state

    between = group.inter_distributed_optimizer_instance_group
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    require_consecutive_instances(inside, between, whole)
    return inside, between


def start_grad_sync(group: Any, force_all_reduce: bool = False) -> None:
    """Add the gradients of a bucket group over its ranks; asynchronously where upstream would.

    Args:
        group: a ``_ParamAndGradBucketGroup``.
        force_all_reduce: every rank wants all sums although the optimizer is distributed.

    Raises:
        NotCoveredError: see `start_gradient_sums` and `require_consecutive_instances`.
    """
    config = group.ddp_config
    if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
        return
    assert group.grad_reduce_handle is None, (
        "Should not have multiple communication calls outstanding at once"
    )
    _wait_for_replayed_graphs(group)
    _copy_extra_main_grads(group)
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        group.check_grads(
            check_for_nan_or_inf=config.check_for_nan_in_grad, check_for_large=config.check_for_large_grads
        )
    inside, between = _ranks(group, config)
    # An average is a sum of scaled terms, as upstream's own scaling is. The number of ranks is a power of two, so
    # scaling before or after the sum differs in no bit (subnormal and overflowing values aside).
    average = (
        inside.size() * (1 if between is None else between.size()) if config.average_in_collective else 1
    )
    with torch.no_grad():
        for bucket in group.buckets:
            factor = bucket.gradient_scaling_factor / average
            if factor != 1.0:
                bucket.grad_data *= factor
    scatter = config.use_distributed_optimizer and not force_all_reduce
    wide = bool(getattr(config, "reduce_scatter_with_fp32_accumulation", False))
    own_stream = between is not None and config.overlap_grad_reduce
    if own_stream:
        group.communication_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(group.communication_stream) if own_stream else contextlib.nullcontext():
        buckets, shards = [bucket.grad_data for bucket in group.buckets], _shards(group) if scatter else None
        if config.overlap_grad_reduce and between is None:
            group.grad_reduce_handle = _started(
                start_gradient_sums(buckets, inside, shards=shards, wide=wide)
            )
            return
        add_gradients(buckets, inside, shards=shards, wide=wide)
        if between is not None:
            add_gradients(_shards(group), between, wide=wide)
