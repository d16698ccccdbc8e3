"""Who computes which part of a gradient (docs/numbers.md, "Tokens").

Operands travel so that one rank sums an element over all tokens, in canonical order. The others hold +0, and the sums
that upstream makes afterwards (data-parallel buckets over DP x CP, ``_allreduce_non_tensor_model_parallel_grads`` over
TP) are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_plugins.parallel_layout import ParallelLayout, canonical_tokens
from te_overrides.kernels.collectives.reference import (
    Sum,
    exchange_columns,
    owned,
    start_all_reduce,
    start_exchange_columns,
    start_reduce_scatter,
)
from te_overrides.kernels.collectives.transport import all_gather, group_size, start_all_gather
from te_overrides.kernels.embedding.ops import embedding_gradient
from te_overrides.kernels.gemm.ops import one_lane
from te_overrides.kernels.granules.ops import granule_partials, sum_granules
from te_overrides.kernels.granules.reference import GRANULE, check_run


def start_weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, layout: ParallelLayout
) -> Callable[[], torch.Tensor]:
    """`weight_gradient` whose operands are sent at once: what it returns waits for the others' and multiplies.

    Both exchanges are under way when this returns, so that what the caller computes next hides them. `x` must not be
    written before the wait. What travels belongs to this function until then, and both ends of it are called on one
    stream: no memory is given to a later computation that the exchange still reads or writes.
    """
    pieces, own = start_exchange_columns(grad, layout.cp_group)
    tokens = start_all_gather(x, layout.cp_group)

    def finish() -> torch.Tensor:
        all_grad = layout.canonical(pieces())
        all_x = layout.canonical(tokens.wait())
        rows = one_lane(canonical_tokens(all_grad).t(), canonical_tokens(all_x).t(), torch.float32)
        return owned(rows, own, grad.shape[-1], dim=0)

    return finish


def weight_gradient(x: torch.Tensor, grad: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
    """dW of ``y = x W^T``: one chain over all tokens, rows owned by context-parallel ranks.

    Args:
        x: [s, B, K], s the positions of this CP rank (already gathered over sequence parallelism).
        grad: [s, B, N].

    Returns:
        [N, K] float32; rows of other CP ranks are +0.
    """
    return start_weight_gradient(x, grad, layout)()


def check_granules(positions: int, layout: ParallelLayout, *, tokens_over_tp: bool) -> None:
    """The tokens held here must be whole granules wherever ranks share tokens.

    Args:
        positions: held by this rank.
        tokens_over_tp: the positions of a CP rank are split over TP (sequence parallelism).

    Raises:
        GranuleError: a run of positions that is no multiple of 16 although ranks share the tokens.
    """
    whole = positions * (layout.tp_size if tokens_over_tp else 1)
    shared = layout.cp_size > 1 or (tokens_over_tp and layout.tp_size > 1)
    runs = layout.chunks(whole) | ({whole // layout.tp_size} if layout.sequence_parallel else set())
    for run in sorted(runs):
        check_run(run, shared, "vector gradient")


def bias_gradient(grad: torch.Tensor, layout: ParallelLayout, *, tokens_over_tp: bool) -> torch.Tensor:
    """Gradient of a bias: `grad` [s, B, C], summed over the tokens as `vector_gradient` does."""
    check_granules(grad.shape[0], layout, tokens_over_tp=tokens_over_tp)
    return vector_gradient(granule_partials(grad), layout, tokens_over_tp=tokens_over_tp)


def vector_gradient(
    partials: torch.Tensor, layout: ParallelLayout, *, tokens_over_tp: bool, heads_over_tp: bool = False
) -> torch.Tensor:
    """Gradient of a vector parameter: granule partials, exchanged by columns, one balanced tree.

    Args:
        partials: [granules, B, C] float32, or [granules, B, groups, C] for q/k-norm, of the positions held here
            (`check_granules`).
        tokens_over_tp: the positions of a CP rank are split over TP (sequence parallelism).
        heads_over_tp: KV groups are split over TP (q/k-norm).

    Returns:
        [C] float32, columns of other ranks +0. TP ranks own columns too where something is split over TP; elsewhere
        every TP rank computes the same sum.
    """
    columns = partials.shape[-1]
    start, width = 0, columns
    if (tokens_over_tp or heads_over_tp) and layout.tp_size > 1:
        pieces, cut = exchange_columns(partials, layout.tp_group)
        partials = torch.cat(pieces, dim=0 if tokens_over_tp else 2)
        start, width = cut.start, cut.stop - cut.start
    if layout.cp_size > 1:
        pieces, cut = exchange_columns(partials, layout.cp_group)
        partials = layout.canonical(pieces, GRANULE)
        start, width = start + cut.start, cut.stop - cut.start
    return owned(sum_granules(partials), slice(start, start + width), columns)


def embedding_weight_gradient(
    ids: torch.Tensor, grad: torch.Tensor, rows: int, first_row: int, layout: ParallelLayout
) -> torch.Tensor:
    """Gradient of this TP rank's rows of the embedding table; columns owned by context-parallel ranks.

    Args:
        ids: [B, s] int64, the positions of this CP rank.
        grad: [s, B, C], gathered over sequence parallelism.
        rows, first_row: this rank's part of the vocabulary.

    Returns:
        [rows, C] float32.
    """
    pieces, own = exchange_columns(grad, layout.cp_group)
    all_grad = layout.canonical(pieces)
    all_ids = layout.canonical(all_gather(ids.transpose(0, 1).contiguous(), layout.cp_group))
    flat_ids = canonical_tokens(all_ids.unsqueeze(-1)).squeeze(-1) - first_row
    return owned(embedding_gradient(flat_ids, canonical_tokens(all_grad), rows), own, grad.shape[-1])


def start_gather_tokens(x: torch.Tensor, layout: ParallelLayout) -> Callable[[], torch.Tensor]:
    """`gather_tokens` that returns at once: what it returns waits for the tokens. `x` must not be written before."""
    if group_size(layout.sp_group) == 1:
        return lambda: x
    moving = start_all_gather(x, layout.sp_group)
    return lambda: torch.cat(moving.wait(), dim=0)


def gather_tokens(x: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
    """[s / TP, B, C] to [s, B, C] under sequence parallelism; anything else unchanged."""
    return start_gather_tokens(x, layout)()


def start_sum_over_tp(partial: torch.Tensor, layout: ParallelLayout, scatter: bool) -> Sum:
    """`sum_over_tp` that returns at once; `partial` must not be written before the wait."""
    start = start_reduce_scatter if scatter else start_all_reduce
    return start(partial, layout.tp_group)


def sum_over_tp(partial: torch.Tensor, layout: ParallelLayout, scatter: bool) -> torch.Tensor:
    """The upper levels of the tree over TP: this rank's share of the tokens (dim 0) if `scatter`, else everything."""
    return start_sum_over_tp(partial, layout, scatter).wait()
