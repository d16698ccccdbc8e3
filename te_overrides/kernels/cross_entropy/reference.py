"""Vocabulary-parallel cross entropy and log-probability (docs/numbers.md, "Rows").

Eight lanes of the padded vocabulary, whatever TP is: a lane's sum of exponentials is a balanced tree over its columns,
the lanes are added by the balanced tree. Ranks exchange lane sums (eight numbers a row), never partial sums of
something else, so a row's loss is the same at TP 1, 2, 4 and 8 and does not depend on the other rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives.reference import select_contribution
from te_overrides.kernels.collectives.transport import all_gather, group_rank, group_size
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.gemm.reference import LANES, lanes_per_rank
from te_overrides.kernels.portable_math.reference import exp, exp_f64, log_f64
from te_overrides.kernels.tree.reference import balanced_tree, balanced_tree_dim

COLUMNS_PER_LANE = 128
VOCABULARY_UNIT = LANES * COLUMNS_PER_LANE
"""The padded vocabulary is a multiple of this, so that no tensor-parallel degree changes it."""


class VocabularyError(ValueError):
    """The padded vocabulary would make lanes depend on the layout."""


def check_vocabulary(padded: int) -> None:
    """Raises VocabularyError unless `padded` is a multiple of 8 * 128."""
    unit = VOCABULARY_UNIT
    if padded % unit:
        want = -(-padded // unit) * unit
        raise VocabularyError(
            f"padded vocabulary {padded} is no multiple of {LANES} lanes x {COLUMNS_PER_LANE} columns = {unit}, so its "
            f"lanes would depend on the tensor-parallel degree. Pad it to {want} at every degree (Megatron: "
            f"--make-vocab-size-divisible-by {unit} / TP, since it multiplies by TP)."
        )


class VocabParallelLogProb(torch.autograd.Function):
    """Log-probability of a target token per row.

    Args of ``apply``:
        logits: [..., V / TP] of any floating dtype, this rank's columns.
        target: [...] int64 token ids of the whole vocabulary. As in Megatron's own loss, a negative one picks no
            column: its logit counts as the row's largest, so the loss is log(sum of exponentials), finite, for a loss
            mask to multiply by 0, and the gradient is that of the sum alone. One beyond the padded vocabulary has no
            meaning that could be masked: NaN (an error would have to wait for the device).
        group: tensor-parallel group or None.
        valid: true vocabulary size; columns from there on are padding and count as -inf. None: all columns count.

    Returns:
        [...] float32.

    Raises:
        VocabularyError: a padded vocabulary that is no multiple of 1024.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup | None,
        valid: int | None,
    ) -> torch.Tensor:
        size, local = group_size(group), logits.shape[-1]
        check_vocabulary(local * size)
        first = group_rank(group) * local
        x = logits.to(torch.float32)
        if valid is not None and first + local > valid:
            x = x.clone()
            x[..., max(0, valid - first) :] = float("-inf")
        # max is exact in any order
        peak = torch.stack(all_gather(x.amax(-1), group)).amax(0)
        lanes = torch.sub(x, peak.unsqueeze(-1)).unflatten(-1, (lanes_per_rank(size), -1))
        own_sums = balanced_tree_dim(exp(lanes), -1)
        sums = torch.cat(all_gather(own_sums, group), dim=-1)
        total = balanced_tree([sums[..., lane] for lane in range(LANES)])
        place = target - first
        here = (place >= 0) & (place < local)
        picked = torch.gather(x, -1, place.clamp(0, local - 1).unsqueeze(-1)).squeeze(-1)
        owner = torch.div(target, local, rounding_mode="floor").clamp(0, size - 1)
        logit = select_contribution(all_gather(picked, group), owner)
        shifted = torch.sub(logit, peak).to(torch.float64)
        shifted = shifted.masked_fill(target < 0, 0.0).masked_fill(target >= local * size, torch.nan)
        ctx.save_for_backward(x, peak, total, place, here)
        ctx.logits_dtype = logits.dtype  # type: ignore[attr-defined]
        return torch.sub(shifted, log_f64(total.to(torch.float64))).to(torch.float32)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        x, peak, total, place, here = ctx.saved_tensors  # type: ignore[attr-defined]
        shifted = torch.sub(x, peak.unsqueeze(-1)).to(torch.float64)
        soft = torch.div(exp_f64(shifted), total.to(torch.float64).unsqueeze(-1)).to(torch.float32)
        one_hot = torch.zeros_like(soft)
        one_hot.scatter_(
            -1, place.clamp(0, x.shape[-1] - 1).unsqueeze(-1), here.to(torch.float32).unsqueeze(-1)
        )
        grad = torch.mul(torch.sub(one_hot, soft), grads[0].to(torch.float32).unsqueeze(-1))
        return grad.to(ctx.logits_dtype), None, None, None  # type: ignore[attr-defined]


@eager_only
def vocab_parallel_log_prob(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    valid: int | None = None,
) -> torch.Tensor:
    """Log-probability of `target`; see `VocabParallelLogProb`."""
    return VocabParallelLogProb.apply(logits, target, group, valid)  # type: ignore[no-any-return,no-untyped-call]


@eager_only
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    valid: int | None = None,
) -> torch.Tensor:
    """``-log_prob``: the loss of each token, [...] float32."""
    return torch.neg(vocab_parallel_log_prob(logits, target, group, valid))
