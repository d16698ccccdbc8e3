"""The all-reduce of Megatron's tensor-parallel regions, added in one order.

Upstream's linear layers, its vocabulary-parallel embedding and modules of other packages add over tensor-parallel ranks
through ``tensor_parallel.mappings``. Our own modules do not come here; a head or a tower beside the model does.

Seam: ``_reduce``, which the autograd functions of its module look up when they run.

Up to 0.18 upstream reduces a copy of a tensor that is not contiguous and returns the tensor itself, unreduced. The sum
is returned here in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.tensor_parallel.reduce",
    target="megatron.core.tensor_parallel.mappings:_reduce",
    modes=("invariant",),
    why="the library's all-reduce adds in an order that depends on size, topology and algorithm",
    how="bytes move in rank order, a balanced tree adds, one rounding an addition; in place as upstream",
    retire_when="the library's all-reduce has one order for every size",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.kernels.collectives.reference import all_reduce

    def _reduce(input_: Any, group: Any) -> Any:
        # Our collectives read None as a group of one.
        assert group is not None, "group should not be None"
        if group.size() == 1:
            return input_
        all_reduce(input_, group, out=input_.detach())
        return input_

    return _reduce
