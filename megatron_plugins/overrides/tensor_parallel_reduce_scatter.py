"""The reduce-scatter of Megatron's sequence-parallel regions, added in one order.

As the all-reduce (``tensor_parallel_reduce.py``), along the first dimension, in equal parts or in parts of given sizes.
The reduce-scatter along the last dimension calls this one. Its counterpart, the all-gather, adds nothing and stays
upstream's.

Seam: ``_reduce_scatter_along_first_dim``, which the autograd functions of its module look up when they run. It is the
only one there that calls the module's alias of torch's reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.tensor_parallel.reduce_scatter",
    target="megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
    modes=("invariant",),
    why="the library's reduce-scatter adds in an order that depends on size, topology and algorithm",
    how="a rank receives its own slice from every rank, a balanced tree adds, one rounding an addition",
    retire_when="the library's reduce-scatter has one order for every size",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
    also=("_reduce_scatter_along_last_dim",),
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from te_overrides.kernels.collectives.reference import reduce_scatter

    def _reduce_scatter_along_first_dim(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        assert group is not None, "group should not be None"
        size = group.size()
        if size == 1:
            return input_
        if input_split_sizes is None:
            rows = input_.shape[0] // size
        else:
            # Parts travel in equal lengths; what is added to a short one is dropped by its owner.
            longest, rows = max(input_split_sizes), input_split_sizes[group.rank()]
            parts = torch.split(input_, input_split_sizes, dim=0)
            padded = input_.new_zeros((size, longest, *input_.shape[1:]))
            for slot, part in zip(padded, parts, strict=True):
                slot[: part.shape[0]] = part.detach()
            input_ = padded.flatten(0, 1)
        mine = reduce_scatter(input_, group)[:rows]
        if not use_global_buffer:
            return mine
        from megatron.core.parallel_state import get_global_memory_buffer

        output = get_global_memory_buffer().get_tensor(list(mine.shape), mine.dtype, "mpu")
        return output.detach().copy_(mine)

    return _reduce_scatter_along_first_dim
