"""The all-reduce of the input gradient in upstream's column-parallel layers whose weight is frozen, added in one order.

As ``linear_input_gradient.py``, for the autograd function that upstream takes when the weight needs no gradient.

Seam: ``LinearWithFrozenWeight.backward``, which autograd looks up on the class when it runs.
"""

from __future__ import annotations

from typing import Any

from patches import override


@override(
    id="megatron.frozen_linear.input_gradient",
    target="megatron.core.tensor_parallel.layers:LinearWithFrozenWeight.backward",
    modes=("invariant",),
    why="the library's all-reduce adds in an order that depends on size, topology and algorithm",
    how="upstream computes this rank's part, a balanced tree over ranks adds the parts",
    retire_when="the library's all-reduce has one order for every size",
    evidence="docs/operations.md",
    distribution="megatron-core",
    versions=">=0.14",
    also=("LinearWithFrozenWeight.forward",),
)
def build(original: Any) -> Any:
    from megatron_plugins.collectives.input_gradient import added_over_ranks

    return staticmethod(added_over_ranks(original.__func__))
