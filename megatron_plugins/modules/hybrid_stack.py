"""Megatron's HybridStack of attention and MLP layers, with a final norm of ours.

Upstream's stack puts a module global (TransformerEngine's norm) behind its layers and has a builder for every kind of
layer; most kinds are not part of the contract. A model's spec names the stack's class, so a subclass is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_plugins.modules.norm import DeterministicRMSNorm
from patches.errors import NotCoveredError

COVERED = (Symbols.ATTENTION, Symbols.MLP)


def _names() -> dict[str, str]:
    return {symbol: name for name, symbol in vars(Symbols).items() if symbol in Symbols.VALID_LAYERS}


def require_covered_layers(symbols: Iterable[str]) -> None:
    """Refuse a pattern with other layers than attention and MLP.

    Args:
        symbols: of Megatron's ``Symbols``, one a layer.

    Raises:
        NotCoveredError: names the kinds of layers, with their symbols and places.
    """
    places: dict[str, list[int]] = {}
    for place, symbol in enumerate(symbols):
        if symbol not in COVERED:
            places.setdefault(symbol, []).append(place)
    if places:
        names = _names()
        found = "; ".join(
            f"{names.get(symbol, 'unknown')} {symbol!r} at {', '.join(map(str, where))}"
            for symbol, where in places.items()
        )
        covered = " and ".join(f"{names[symbol]} {symbol!r}" for symbol in COVERED)
        raise NotCoveredError(
            f"this hybrid pattern has layers that are not part of the contract: {found}. Covered are {covered}: use a "
            "pattern of those, or run upstream's stack without --deterministic-rocm=invariant."
        )


def require_covered_pattern(pattern: str) -> None:
    """`require_covered_layers` for a whole ``--hybrid-layer-pattern``, stages and multi-token prediction included.

    Raises:
        NotCoveredError: multi-token prediction, or what `require_covered_layers` names.
    """
    main, separator, depths = pattern.partition(Symbols.MTP_SEPARATOR)
    if separator:
        raise NotCoveredError(
            f"hybrid pattern {pattern!r} ends in multi-token prediction ({depths!r}): its block is not part of the "
            f"contract yet. Use {main!r}."
        )
    require_covered_layers(main.replace(Symbols.PIPE, ""))


class DeterministicHybridStack(HybridStack):
    """HybridStack whose layers are deterministic attention and MLP layers.

    Raises:
        NotCoveredError: a layer of another kind.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        *,
        layer_type_list: list[str],
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        require_covered_layers(layer_type_list)
        super().__init__(config, submodules, layer_type_list=layer_type_list, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = DeterministicRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
