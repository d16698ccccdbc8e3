"""TransformerEngine's all-reduce over symmetric memory (`symmetric_ar_type`), added in one order.

Its variants add on the switch (multimem), in one kernel or in two: each in an order of its own. How bytes move is the
transport's business and cannot change a bit; so whichever variant is asked for, the sum is the tree.

Seam: `symmetric_all_reduce` in its defining module; the linear modules import it by name afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import NotCoveredError


@override(
    id="te.symmetric_all_reduce",
    target="transformer_engine.pytorch.distributed:symmetric_all_reduce",
    modes=("invariant",),
    why="each symmetric-memory variant adds in an order of its own",
    how="the balanced tree over ranks, whichever variant is asked for",
    retire_when="never: the variants differ by design",
    evidence="docs/numbers.md",
    distribution="transformer-engine",
    versions=">=2.3",
    also=("get_distributed_world_size",),
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from te_overrides.tensor_parallel_sums import all_reduce_in_place

    @functools.wraps(original)
    def symmetric_all_reduce(
        inp: Any, tp_group: Any = None, async_op: bool = False, all_reduce_type: str = "multimem_all_reduce"
    ) -> Any:
        if async_op:
            raise NotCoveredError(
                f"symmetric_all_reduce was called with async_op={async_op!r}; upstream has no such form. Call "
                "allreduce."
            )
        return all_reduce_in_place(inp, tp_group, False)

    return symmetric_all_reduce
