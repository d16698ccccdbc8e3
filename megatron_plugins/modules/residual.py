"""Residual add with bias: one rounding for the bias, one for the residual, in that order.

Megatron's fused form compiles both adds and rounds once; its unfused form rounds twice. The layer spec names this
function, so ``bias_dropout_fusion`` cannot change bits. Dropout is refused when modules are built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_plugins.modules import norm_ahead
from megatron_plugins.modules.linear import BiasAdd
from megatron_plugins.modules.norm_functions import add_rms_norm
from megatron_plugins.packed_order import of_batch
from megatron_plugins.parallel_layout import ParallelLayout
from patches.errors import NotCoveredError
from te_overrides.kernels.eager import eager_only

BiasDropoutAdd = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def _branch(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """The branch with its bias, if any, in the residual stream's dtype if that is float32 (exact).

    Raises:
        NotCoveredError: dropout, or a bias that is not a deterministic linear's.
    """
    x, bias = x_with_bias
    if prob:
        raise NotCoveredError(f"dropout probability {prob} reached the residual add; set --hidden-dropout 0.")
    if bias is None:
        return _widened(x, residual)
    layout: ParallelLayout | None = getattr(bias, "deterministic_layout", None)
    if layout is None:
        raise NotCoveredError(
            "a bias without a layout reached the residual add: it does not come from a deterministic row-parallel "
            "linear, so the order of its gradient is unknown. Use the deterministic layer spec for the whole layer."
        )
    return _widened(BiasAdd.apply(x, bias, of_batch(layout), layout.sequence_parallel), residual)


def _widened(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """With ``--fp32-residual-connection`` the branches are of the parameters' dtype, the stream float32."""
    return x.to(torch.float32) if residual.dtype == torch.float32 else x


@eager_only
def _bias_dropout_add(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    return torch.add(residual, _branch(x_with_bias, residual, prob))


def get_deterministic_bias_dropout_add(training: bool, fused: bool, **_: Any) -> BiasDropoutAdd:
    """Drop-in for ``megatron.core.fusions.fused_bias_dropout.get_bias_dropout_add``; both arguments change nothing."""
    return _bias_dropout_add


class AddBeforeNorm:
    """`get_deterministic_bias_dropout_add` where a norm is known to follow: add and norm in one pass, the same bits.

    The norm waits on the sum that is returned (`norm_ahead`).

    Args:
        norm: the module that is called with the sum next; it has `norm_terms`.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, training: bool, fused: bool, **_: Any) -> BiasDropoutAdd:
        return self._add

    @eager_only
    def _add(
        self, x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
    ) -> torch.Tensor:
        x = _branch(x_with_bias, residual, prob)
        alike = x.shape == residual.shape and x.dtype == residual.dtype
        if not (alike and norm_ahead.can_wait(x) and _weight_is_here(self.norm)):
            return torch.add(residual, x)
        terms = self.norm.norm_terms()
        total, normed = add_rms_norm(x, residual, terms)
        norm_ahead.leave(total, normed, terms)
        return total


def _weight_is_here(norm: Any) -> bool:
    """Whether the norm's weight may be read before the norm is called.

    With ``--overlap-param-gather`` the weight is still on its way until a forward pre-hook of Megatron's
    DistributedDataParallel has waited for it; that hook may run early and twice. What another hook does is not known
    here: the norm is left for when it is called.
    """
    hooks = list(norm._forward_pre_hooks.values())
    if any(hook.__module__ != DistributedDataParallel.__module__ for hook in hooks):
        return False
    for hook in hooks:
        hook(norm, ())
    return True
