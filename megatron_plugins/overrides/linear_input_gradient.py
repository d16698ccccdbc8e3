"""The all-reduce of the input gradient in upstream's column-parallel layers, added in one order.

Upstream's backward starts ``torch.distributed.all_reduce`` itself, looked up in torch when it runs, so no name of its
module can be replaced. It is asked for this rank's part instead, with ``allreduce_dgrad`` off, and the parts are added
here afterwards. That gives up the overlap with dW; layers of ours never come here.

Seam: ``LinearWithGradAccumulationAndAsyncCommunication.backward``, which autograd looks up on the class when it runs.
Sequence parallelism takes another branch of it (``linear_reduce_scatter.py``).
"""

from __future__ import annotations

from typing import Any

from patches import override


@override(
    id="megatron.linear.input_gradient",
    target="megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    modes=("invariant",),
    why="the library's all-reduce adds in an order that depends on size, topology and algorithm",
    how="upstream computes this rank's part, a balanced tree over ranks adds the parts",
    retire_when="the library's all-reduce has one order for every size",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
    also=("LinearWithGradAccumulationAndAsyncCommunication.forward",),
)
def build(original: Any) -> Any:
    from megatron_plugins.collectives.input_gradient import added_over_ranks

    return staticmethod(added_over_ranks(original.__func__))
