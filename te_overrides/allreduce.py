"""TransformerEngine's all-reduce over tensor-parallel ranks, added in one order.

The library's order follows the message size, the topology and the algorithm that it picks. TransformerEngine's linear
layers add partial outputs and input gradients with it, past Megatron's own mappings. A model of deterministic layers
has none of these modules; whatever else runs in the process has.

Seam: `allreduce` in its defining module; `linear.py`, `layernorm_linear.py` and `layernorm_mlp.py` import it by name
afterwards. Adds in place and returns a handle for `async_op`, as upstream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="te.allreduce",
    target="transformer_engine.pytorch.distributed:allreduce",
    modes=("invariant",),
    why="the library's all-reduce adds in an order that depends on size, topology and algorithm",
    how="bytes move in rank order, a balanced tree adds, one rounding an addition",
    retire_when="the library's all-reduce has one order for every size",
    evidence="docs/numbers.md",
    distribution="transformer-engine",
    versions=">=2.3",
    also=("get_distributed_world_size",),
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.tensor_parallel_sums import all_reduce_in_place

    @functools.wraps(original)
    def allreduce(inp: Any, tp_group: Any = None, async_op: bool = False) -> Any:
        return all_reduce_in_place(inp, tp_group, async_op)

    return allreduce
