"""dX of a column-parallel linear: eight lanes over its output rows, and the reduction over TP, started and not awaited.

Two forms for packed parts (``[gate; up]``), each with bits of its own in every layout (docs/numbers.md, "Eight lanes"):

* packed: lane i is slice i of every part, one chain; one contraction, one reduction.
* two-lane, as published elsewhere: each part is an eight-lane contraction and a reduction of its own, and the sums are
  added in the order of the parts, one rounding an addition. A small pair of sums travels as one exchange; of a large
  pair the first travels while the second is computed. That choice follows bytes, and cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_plugins.collectives.ownership import start_sum_over_tp
from megatron_plugins.parallel_layout import ParallelLayout
from te_overrides.kernels.collectives.reference import start_reduce_scatter_many
from te_overrides.kernels.gemm.ops import lane_tree

PACKED_BYTES = 8 << 20
"""Up to here the parts' sums of the two-lane form travel as one exchange."""


def _partial(
    grad: torch.Tensor, weight: torch.Tensor, layout: ParallelLayout, segments: int = 1
) -> torch.Tensor:
    """This rank's subtree: grad [s, B, N / TP], weight [N / TP, K] -> [s, B, K]."""
    rows = weight.shape[0] // segments
    flat = lane_tree(
        grad.reshape(-1, grad.shape[-1]), weight.t(), tp_size=layout.tp_size, segments=[rows] * segments
    )
    return flat.view(*grad.shape[:-1], weight.shape[1])


def start_input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, layout: ParallelLayout, segments: int, two_lane: bool
) -> Callable[[], torch.Tensor]:
    """Compute this rank's part and start the reduction; what is returned waits for it and gives dX.

    Args:
        grad: [s, B, N / TP].
        weight: [N / TP, K].
        segments: packed parts of the rows.
        two_lane: reduce the parts separately.
    """
    scatter = layout.sequence_parallel
    if not two_lane or segments == 1:
        return start_sum_over_tp(_partial(grad, weight, layout, segments), layout, scatter).wait
    rows = weight.shape[0] // segments
    cuts = [slice(i * rows, (i + 1) * rows) for i in range(segments)]
    if scatter and grad.shape[0] * grad.shape[1] * weight.shape[1] * grad.element_size() <= PACKED_BYTES:
        partials = [_partial(grad[..., cut], weight[cut], layout) for cut in cuts]
        packed = start_reduce_scatter_many(partials, layout.tp_group)
        return lambda: _added(packed.wait_all())
    moving = [
        start_sum_over_tp(_partial(grad[..., cut], weight[cut], layout), layout, scatter) for cut in cuts
    ]
    return lambda: _added([one.wait() for one in moving])


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = torch.add(total, part)
    return total
