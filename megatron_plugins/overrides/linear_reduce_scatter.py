"""The reduce-scatter that upstream's linear layers start beside their weight gradient, added in one order.

``tensor_parallel/layers.py`` binds ``dist_reduce_scatter_func`` to torch's reduce-scatter when it is imported, and
calls it once, for the input gradient under sequence parallelism, while dW is computed. torch's function has many other
callers and stays; this module's name for it is replaced.

Seam: the alias itself. What enters the fingerprint are the statements that assign it and the function that calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import NotCoveredError


@override(
    id="megatron.linear.reduce_scatter",
    target="megatron.core.tensor_parallel.layers:dist_reduce_scatter_func",
    kind="alias",
    modes=("invariant",),
    why="the library's reduce-scatter adds in an order that depends on size, topology and algorithm",
    how="a rank receives its own slice from every rank while dW is computed; a balanced tree adds at the wait",
    retire_when="the library's reduce-scatter has one order for every size",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
    also=("LinearWithGradAccumulationAndAsyncCommunication.backward",),
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch.distributed as dist

    from te_overrides.kernels.collectives.reference import start_reduce_scatter

    def dist_reduce_scatter_func(
        output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.SUM:
            raise NotCoveredError(
                f"a linear layer asked for a reduce-scatter with {op}; the contract defines the sum. Use the layer as "
                "upstream ships it, or run without --deterministic-rocm."
            )
        whole = dist.group.WORLD if group is None else group
        under_way = start_reduce_scatter(input, whole, out=output)
        if async_op:
            return under_way
        under_way.wait()
        return None

    return dist_reduce_scatter_func
