"""Merging the partial results of context-parallel attention, with one answer for every caller (C2).

Ring attention sees the keys in steps. A step leaves an output and the log-sum-exp (LSE) of its scores; two steps are
joined by

    lse' = max(lse, step) + log1p(exp(min(lse, step) - max(lse, step)))
    out' = out * exp(lse - lse') + out_step * exp(step - lse')

Upstream hands these few lines to torch.compile, and the compiled variants of one process disagree in the last bit
(ROCm/TransformerEngine#693). Here exp and log1p are portable (`kernels/portable_math`), evaluated in float64 and
rounded once to the accumulator's dtype, so the bits are a function of the operands alone.

A row without keys has LSE -inf. Some kernels say +inf instead (flash-attention#978): it is read as -inf. What such a
row's output holds is never looked at, so the merge of two empty rows is -inf and 0 where upstream's is NaN. Any finite
LSE is a number, sentinels like -49993.98 (flashinfer#4452) included. NaN stays NaN.

An output is corrected in the promoted dtype of output and weight (float32 for bf16 outputs and float32 LSE): one
rounding for the weight, one per product, one per sum, one to the output's dtype.

Shapes, as upstream passes them: `softmax_lse` [b, h, s] or, for the merge alone, any shape, packed [h, t] included;
`out` [b, s, h, d] with seq_dim 1 or [s, b, h, d] with seq_dim 0; the second-half forms take `out` with the sequence
dimension split in (2, s/2). LSE float32 or float64 (the accumulator of TransformerEngine up to 2.3), outputs any
floating dtype, strides any. Functions ending in an underscore write into their first argument.

Raises ValueError where shapes do not agree, TypeError for an LSE that is neither float32 nor float64.
"""

import torch

from te_overrides.kernels.portable_math.reference import exp_f64, log1p_f64


def merge_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """Join the LSE of one step to the accumulated one, in place; both of one shape."""
    softmax_lse.copy_(merged_lse(softmax_lse, softmax_lse_per_step))


def merge_second_half_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """The same for the second half of every sequence: softmax_lse [..., 2, s/2], softmax_lse_per_step [..., s/2]."""
    merge_lse_(softmax_lse[..., 1, :], softmax_lse_per_step)


def merged_lse(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> torch.Tensor:
    """The joined LSE as a new tensor in the dtype of `softmax_lse`. Exactly symmetric in its arguments' values."""
    _require_same_shape(softmax_lse, softmax_lse_per_step)
    first, second = _read_lse(softmax_lse), _read_lse(softmax_lse_per_step)
    high = torch.where(first > second, first, second)
    low = torch.where(first > second, second, first)
    merged = high + log1p_f64(exp_f64(low - high))
    no_keys = (first == float("-inf")) & (second == float("-inf"))
    return torch.where(no_keys, float("-inf"), merged).to(softmax_lse.dtype)


def correction_weight(softmax_lse_per_step: torch.Tensor, softmax_lse: torch.Tensor) -> torch.Tensor:
    """exp(step - lse), 0 for a step without keys; rounded once to the wider dtype of the two LSEs."""
    _require_same_shape(softmax_lse_per_step, softmax_lse)
    step, total = _read_lse(softmax_lse_per_step), _read_lse(softmax_lse)
    no_keys = (step == float("-inf")) & (total == float("-inf"))
    weight = torch.where(no_keys, 0.0, exp_f64(step - total))
    return weight.to(torch.promote_types(softmax_lse_per_step.dtype, softmax_lse.dtype))


def out_correction_init(
    out_init_step: torch.Tensor, softmax_lse: torch.Tensor, softmax_lse_init_step: torch.Tensor, seq_dim: int
) -> torch.Tensor:
    """The first step's output weighted by the final LSE, as a new tensor (TransformerEngine 2.2 to 2.19).

    It has the strides of `out_init_step`: the caller goes on with a view of it.
    """
    weighted = _weighted(out_init_step, softmax_lse_init_step, softmax_lse, seq_dim)
    return torch.empty_like(out_init_step).copy_(weighted)


def out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """Add one step's output, weighted by the final LSE (TransformerEngine 2.2 to 2.19)."""
    weighted = _weighted(out_per_step, softmax_lse_per_step, softmax_lse, seq_dim)
    _require_same_shape(out, weighted)
    out.copy_(out.to(weighted.dtype) + weighted)


def second_half_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """The same for the second half of the sequence; out [b, 2, s/2, h, d] (seq_dim 1), softmax_lse [b, h, s]."""
    second_half = _second_half(softmax_lse)
    out_correction_(out.select(seq_dim, 1), out_per_step, second_half, softmax_lse_per_step, seq_dim)


def incremental_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_softmax_lse: torch.Tensor,
    new_softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """Rescale the accumulated output from the old to the new LSE and add one step's (TransformerEngine from 2.20)."""
    weighted = _weighted(out_per_step, softmax_lse_per_step, new_softmax_lse, seq_dim)
    _require_same_shape(out, weighted)
    rescaled = _weighted(out, old_softmax_lse, new_softmax_lse, seq_dim)
    out.copy_(rescaled + weighted)


def incremental_second_half_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_softmax_lse: torch.Tensor,
    new_softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """The same for the second half of the sequence; out [b, 2, s/2, h, d] (seq_dim 1), both LSEs [b, h, s]."""
    incremental_out_correction_(
        out.select(seq_dim, 1),
        out_per_step,
        _second_half(old_softmax_lse),
        _second_half(new_softmax_lse),
        softmax_lse_per_step,
        seq_dim,
    )


def merge_(
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """Join one step's output and LSE to the accumulated ones, both in place: `merge_lse_` and the incremental form."""
    merged = merged_lse(softmax_lse, softmax_lse_per_step)
    incremental_out_correction_(out, out_per_step, softmax_lse, merged, softmax_lse_per_step, seq_dim)
    softmax_lse.copy_(merged)


def _read_lse(softmax_lse: torch.Tensor) -> torch.Tensor:
    if softmax_lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"LSE merge: expected a float32 or float64 LSE, got {softmax_lse.dtype}")
    value = softmax_lse.to(torch.float64)
    return torch.where(value == float("inf"), float("-inf"), value)


def _require_same_shape(first: torch.Tensor, second: torch.Tensor) -> None:
    if first.shape != second.shape:
        raise ValueError(
            f"LSE merge: shapes {tuple(first.shape)} and {tuple(second.shape)} differ; "
            "both must hold the same rows, heads and positions"
        )


def _second_half(softmax_lse: torch.Tensor) -> torch.Tensor:
    """[..., s] -> the last s/2 positions, as a view."""
    return softmax_lse.unflatten(-1, (2, -1))[..., 1, :]


def _weighted(
    out: torch.Tensor, lse_of_out: torch.Tensor, softmax_lse: torch.Tensor, seq_dim: int
) -> torch.Tensor:
    """out * exp(lse_of_out - softmax_lse), 0 where `out` comes from no key; in the promoted dtype."""
    weight = correction_weight(lse_of_out, softmax_lse).movedim(2, seq_dim).unsqueeze(-1)
    if out.shape[:-1] != weight.shape[:-1]:
        raise ValueError(
            f"LSE merge: an output of shape {tuple(out.shape)} does not fit an LSE of shape "
            f"{tuple(lse_of_out.shape)} with the sequence in dimension {seq_dim} of the output"
        )
    no_keys = torch.isinf(lse_of_out).movedim(2, seq_dim).unsqueeze(-1)
    product = out.to(torch.promote_types(out.dtype, weight.dtype)) * weight
    return torch.where(no_keys, torch.zeros_like(product), product)
