"""TransformerEngine's reduce-scatter over tensor-parallel ranks, added in one order.

As its all-reduce, under sequence parallelism: partial outputs and input gradients of its linear layers, and dK and dV
of its all-gather attention where that is not replaced as a whole.

Seam: `reduce_scatter_along_first_dim` in its defining module; the linear modules, `ops/basic/basic_linear.py` and
`context_parallel.py` import it by name afterwards. `output` came with 2.19.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.reduce_scatter_along_first_dim",
    target="transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim",
    modes=("invariant",),
    why="the library's reduce-scatter adds in an order that depends on size, topology and algorithm",
    how="a rank receives its own slice from every rank, a balanced tree adds, one rounding an addition",
    retire_when="the library's reduce-scatter has one order for every size",
    evidence="docs/numbers.md",
    distribution="transformer-engine",
    versions=">=2.3",
    also=("get_distributed_world_size",),
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.kernels.collectives.reference import start_reduce_scatter
    from te_overrides.tensor_parallel_sums import group_or_default, handle_of

    @functools.wraps(original)
    def reduce_scatter_along_first_dim(
        inp: Any, tp_group: Any, async_op: bool = False, output: Any = None
    ) -> Any:
        group = group_or_default(tp_group)
        if group is None or group.size() == 1:
            return inp, None
        if output is None:
            rows = inp.shape[0] // group.size()
            output = inp.new_empty((rows, *inp.shape[1:]))
        return output, handle_of(start_reduce_scatter(inp, group, out=output.detach()), async_op)

    return reduce_scatter_along_first_dim
