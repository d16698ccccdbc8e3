"""RMSNorm, one row at a time (docs/numbers.md, "Rows").

Sum of squares: balanced tree over the columns. Mean, epsilon, square root and reciprocal in float64, rounded once.
The normalized row is rounded to the activation dtype before it meets the weight, as Hugging Face and
TransformerEngine's reference do. A row's bits do not depend on how many rows share the call.
"""

from __future__ import annotations

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.granules.reference import granule_partials
from te_overrides.kernels.tree.reference import balanced_tree_dim


def _effective_weight(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    w = weight.to(torch.float32)
    return torch.add(w, 1.0) if zero_centered else w


@eager_only
def rstd_of(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of each row. `x`: [..., H] -> [..., 1] float32."""
    x32 = x.to(torch.float32)
    total = balanced_tree_dim(torch.mul(x32, x32), -1).unsqueeze(-1).to(torch.float64)
    mean = torch.div(total, float(x.shape[-1]))
    return torch.div(1.0, torch.sqrt(torch.add(mean, eps))).to(torch.float32)


@eager_only
def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)``. `x`: [..., H]; `weight`: [H]; y in the dtype of `x`, rstd [..., 1] float32.

    `zero_centered` adds one to the weight (Megatron's ``layernorm_zero_centered_gamma``).
    """
    rstd = rstd_of(x, eps)
    normed = torch.mul(x.to(torch.float32), rstd).to(x.dtype)
    y = torch.mul(normed.to(torch.float32), _effective_weight(weight, zero_centered)).to(x.dtype)
    return y, rstd


@eager_only
def rmsnorm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, terms)``: dx like `x`; `terms` [..., H] float32 are the per-row summands of the weight's gradient.

    ``g = grad * w``; ``xhat = x * rstd``; ``c = tree(g * xhat) / H``; ``dx = rstd * (g - xhat * c)``, each operation
    rounded to float32 (the division in float64). How the terms are summed over tokens is the granules' business.
    """
    g32, x32 = grad.to(torch.float32), x.to(torch.float32)
    g = torch.mul(g32, _effective_weight(weight, zero_centered))
    xhat = torch.mul(x32, rstd)
    total = balanced_tree_dim(torch.mul(g, xhat), -1).unsqueeze(-1).to(torch.float64)
    c = torch.div(total, float(x.shape[-1])).to(torch.float32)
    dx = torch.mul(rstd, torch.sub(g, torch.mul(xhat, c))).to(x.dtype)
    terms = torch.mul(g32, xhat.to(x.dtype).to(torch.float32))
    return dx, terms


def by_group(terms: torch.Tensor, groups: int | None) -> torch.Tensor:
    """[s, B, heads, d] to [s, B, groups, heads of a group, d]; without groups unchanged."""
    if groups is None:
        return terms
    s, b, heads, d = terms.shape
    return terms.view(s, b, groups, heads // groups, d)


@eager_only
def rmsnorm_backward_partials(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool = False,
    groups: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, partials)``: `rmsnorm_backward`, its terms added up within granules.

    Args:
        grad, x: [s, B, H], or [s, B, heads, d] for a norm over heads.
        groups: KV groups that the heads are cut into; None for a norm over the hidden size.

    Returns:
        dx like `x`; partials [granules, B, H], or [granules, B, groups, d], float32.
    """
    dx, terms = rmsnorm_backward(grad, x, weight, rstd, zero_centered)
    return dx, granule_partials(by_group(terms, groups))
