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

An output is corrected in float32 (in float64 if any operand is): one rounding for the weight, one per product, one per
sum, one to the output's dtype.

Shapes, as upstream passes them: `softmax_lse` [b, h, s] or, for the merge alone, any shape, packed [h, t] included;
`out` [b, s, h, d] with seq_dim 1 or [s, b, h, d] with seq_dim 0; the second-half forms take `out` with the sequence
dimension split in (2, s/2). LSE float32 or float64 (the accumulator of TransformerEngine up to 2.3), outputs any
floating dtype, strides any. Functions ending in an underscore write into their first argument.

Raises ValueError where shapes do not agree, TypeError for an LSE that is neither float32 nor float64.
"""

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.portable_math.reference import exp_f64, log1p_f64


@eager_only
def merge_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """Join the LSE of one step to the accumulated one, in place; both of one shape."""
    softmax_lse.copy_(merged_lse(softmax_lse, softmax_lse_per_step))


@eager_only
def merge_second_half_lse_(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """The same for the second half of every sequence: softmax_lse [..., 2, s/2], softmax_lse_per_step [..., s/2]."""
    merge_lse_(softmax_lse[..., 1, :], softmax_lse_per_step)


@eager_only
def merged_lse(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> torch.Tensor:
    """The joined LSE as a new tensor in the dtype of `softmax_lse`. Exactly symmetric in its arguments' values."""
    require_mergeable(softmax_lse, softmax_lse_per_step)
    first, second = _read_lse(softmax_lse), _read_lse(softmax_lse_per_step)
    high = torch.where(first > second, first, second)
    low = torch.where(first > second, second, first)
    merged = high + log1p_f64(exp_f64(low - high))
    no_keys = (first == float("-inf")) & (second == float("-inf"))
    return torch.where(no_keys, float("-inf"), merged).to(softmax_lse.dtype)


@eager_only
def correction_weight(
    softmax_lse_per_step: torch.Tensor, softmax_lse: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """exp(step - lse), 0 for a step without keys, rounded once to `dtype`."""
    require_mergeable(softmax_lse, softmax_lse_per_step)
    step, total = _read_lse(softmax_lse_per_step), _read_lse(softmax_lse)
    no_keys = (step == float("-inf")) & (total == float("-inf"))
    return torch.where(no_keys, 0.0, exp_f64(step - total)).to(dtype)


@eager_only
def out_correction_init(
    out_init_step: torch.Tensor, softmax_lse: torch.Tensor, softmax_lse_init_step: torch.Tensor, seq_dim: int
) -> torch.Tensor:
    """The first step's output weighted by the final LSE, as a new tensor (TransformerEngine 2.2 to 2.19).

    It has the strides of `out_init_step`: the caller goes on with a view of it.
    """
    require_correctable(out_init_step, out_init_step, softmax_lse_init_step, seq_dim)
    out, dtype = (
        torch.empty_like(out_init_step),
        _wide_or_float32(out_init_step, softmax_lse, softmax_lse_init_step),
    )
    _write(out, _weighted(out_init_step, softmax_lse_init_step, softmax_lse, seq_dim, dtype))
    return out


@eager_only
def out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """Add one step's output, weighted by the final LSE (TransformerEngine 2.2 to 2.19)."""
    require_correctable(out, out_per_step, softmax_lse_per_step, seq_dim)
    dtype = _wide_or_float32(out, out_per_step, softmax_lse, softmax_lse_per_step)
    weighted = _weighted(out_per_step, softmax_lse_per_step, softmax_lse, seq_dim, dtype)
    _write(out, out.to(dtype) + weighted)


@eager_only
def second_half_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """The same for the second half of the sequence; out [b, 2, s/2, h, d] (seq_dim 1), softmax_lse [b, h, s]."""
    out_correction_(
        out.select(seq_dim, 1), out_per_step, second_half(softmax_lse), softmax_lse_per_step, seq_dim
    )


@eager_only
def incremental_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_softmax_lse: torch.Tensor,
    new_softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    seq_dim: int,
) -> None:
    """Rescale the accumulated output from the old to the new LSE and add one step's (TransformerEngine from 2.20)."""
    require_correctable(out, out_per_step, softmax_lse_per_step, seq_dim)
    dtype = _wide_or_float32(out, out_per_step, old_softmax_lse, new_softmax_lse, softmax_lse_per_step)
    weighted = _weighted(out_per_step, softmax_lse_per_step, new_softmax_lse, seq_dim, dtype)
    rescaled = _weighted(out, old_softmax_lse, new_softmax_lse, seq_dim, dtype)
    _write(out, rescaled + weighted)


@eager_only
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
        second_half(old_softmax_lse),
        second_half(new_softmax_lse),
        softmax_lse_per_step,
        seq_dim,
    )


@eager_only
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


def second_half(softmax_lse: torch.Tensor) -> torch.Tensor:
    """[..., s] -> the last s/2 positions, as a view."""
    return softmax_lse.unflatten(-1, (2, -1))[..., 1, :]


def require_mergeable(softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor) -> None:
    """Raises ValueError unless both have one shape, TypeError unless each is float32 or float64."""
    for lse in (softmax_lse, softmax_lse_per_step):
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"LSE merge: expected a float32 or float64 LSE, got {lse.dtype}")
    if softmax_lse.shape != softmax_lse_per_step.shape:
        raise ValueError(
            f"LSE merge: shapes {tuple(softmax_lse.shape)} and {tuple(softmax_lse_per_step.shape)} differ; "
            "both must hold the same rows, heads and positions"
        )


def require_correctable(
    out: torch.Tensor, out_per_step: torch.Tensor, softmax_lse: torch.Tensor, seq_dim: int
) -> None:
    """Raises ValueError unless both outputs have one shape and their rows are those of the LSE [b, h, s]."""
    if out.shape != out_per_step.shape:
        raise ValueError(
            f"LSE merge: outputs of shapes {tuple(out.shape)} and {tuple(out_per_step.shape)} differ; "
            "both must hold the same rows, heads and positions"
        )
    if softmax_lse.dim() != 3 or softmax_lse.movedim(2, seq_dim).shape != out.shape[:-1]:
        raise ValueError(
            f"LSE merge: an output of shape {tuple(out.shape)} does not fit an LSE of shape "
            f"{tuple(softmax_lse.shape)} with the sequence in dimension {seq_dim} of the output"
        )


def _read_lse(softmax_lse: torch.Tensor) -> torch.Tensor:
    value = softmax_lse.to(torch.float64)
    return torch.where(value == float("inf"), float("-inf"), value)


def _wide_or_float32(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype that outputs are corrected in: float64 if anything is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _weighted(
    out: torch.Tensor, lse_of_out: torch.Tensor, softmax_lse: torch.Tensor, seq_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """out * exp(lse_of_out - softmax_lse) in `dtype`, 0 where `out` comes from no key."""
    weight = correction_weight(lse_of_out, softmax_lse, dtype).movedim(2, seq_dim).unsqueeze(-1)
    no_keys = torch.isinf(lse_of_out).movedim(2, seq_dim).unsqueeze(-1)
    product = out.to(dtype) * weight
    return torch.where(no_keys, torch.zeros_like(product), product)


def _write(out: torch.Tensor, value: torch.Tensor) -> None:
    """One rounding to float32 on the way from float64 to a 16-bit dtype."""
    out.copy_(value if out.dtype == torch.float64 else value.to(torch.float32))
