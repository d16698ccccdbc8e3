"""Which of the contract's activations a Megatron configuration asks for, or that there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from patches.errors import NotCoveredError
from te_overrides.kernels.activations.reference import Activate
from te_overrides.kernels.swiglu.ops import SwiGLU

_BY_OBJECT = {F.silu: "silu", F.relu: "relu"}
_BY_NAME = {
    "megatron.core.activations.squared_relu": "squared_relu",
    "megatron.core.activations.quick_gelu": "quick_gelu",
    "megatron.core.activations.fast_gelu": "tanh_gelu",
    "megatron.core.transformer.utils.openai_gelu": "tanh_gelu",
}


def _said(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__name__', function)}"


def activation_of(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation between the two projections of an MLP, with its gradient.

    Args:
        config: Megatron's TransformerConfig: ``activation_func``, ``gated_linear_unit`` and their variants.

    Raises:
        NotCoveredError: an activation without portable arithmetic (GELU by the error function among them), clamped
            gates, offset gates.
    """
    clamp = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0)
    if clamp is not None or offset:
        raise NotCoveredError(
            f"activation_func_clamp_value={clamp}, glu_linear_offset={offset}: clamped and offset gates are not part "
            "of the contract. Switch them off."
        )
    function = config.activation_func
    name = _BY_OBJECT.get(function) or _BY_NAME.get(_said(function))
    if name is None:
        raise NotCoveredError(
            f"activation_func={_said(function)}, gated_linear_unit={config.gated_linear_unit}: the contract has "
            f"portable arithmetic for torch's silu and relu and for {', '.join(sorted(_BY_NAME))}, plain and "
            "gated. GELU by the error function has none: take its tanh form (fast_gelu), or --swiglu."
        )
    if name == "silu" and config.gated_linear_unit:
        return SwiGLU.apply
    return lambda x: Activate.apply(x, name, bool(config.gated_linear_unit))
