"""Gradient buckets, added over data-parallel ranks in one order.

Upstream hands whole buckets to the library's all-reduce or, for the distributed optimizer, reduce-scatter. The order in
which an element is added over ranks then follows the size of the bucket that it lies in and its place there, so bucket
size, overlap and optimizer change bits. Here bytes move in rank order and the balanced tree adds: an element's sum
depends on its terms alone (``collectives/gradient_sums.py``).

Seam: ``_ParamAndGradBucketGroup.start_grad_sync``. Overlap is kept: with ``overlap_grad_reduce`` the bytes are on
their way when it returns, and upstream's ``finish_grad_sync`` waits for the handle that it left. It is the only caller
of the module's alias of torch's reduce-scatter, which upstream itself swaps under
``reduce_scatter_with_fp32_accumulation``: the tree in float32 here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.gradient_buckets",
    target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
    modes=("invariant",),
    why="the library's order depends on the bucket a gradient lies in, hence on bucket size, overlap and optimizer",
    how="exact over context parallelism by ownership, the balanced tree over data-parallel ranks",
    retire_when="the library's all-reduce and reduce-scatter have one order for every size",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
    also=(
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "_ParamAndGradBucketGroup.register_grad_ready",
        "shard_buffer",
    ),
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_plugins.collectives import gradient_buckets

    @functools.wraps(original)
    def start_grad_sync(self: Any, force_all_reduce: Any = False) -> None:
        gradient_buckets.start_grad_sync(self, bool(force_all_reduce))

    return start_grad_sync
