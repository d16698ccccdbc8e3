"""The flag in Megatron's argument parser, and the spec that it selects.

Seam: ``parse_args`` in its defining module; ``initialize`` imports it by name afterwards. The flag is added through
``extra_args_provider``, upstream's own way to extend the parser, so ``ignore_unknown_args`` cannot drop it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import patches
from patches import override


@override(
    id="megatron.parse_args",
    target="megatron.training.arguments:parse_args",
    modes=("stable", "invariant"),
    why="a launch script must be able to say --deterministic-rocm, and an unarmed run must not accept it",
    how="adds the flag through extra_args_provider; sets --spec in invariant mode where the user gave none",
    retire_when="never: this is the project's own argument",
    evidence="docs/patch-layer.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_plugins.arguments import add_flag, apply_flag

    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        def provider(parser: Any) -> Any:
            parser = add_flag(parser)
            return extra_args_provider(parser) if extra_args_provider is not None else parser

        args = original(provider, ignore_unknown_args)
        armed = patches.armed_mode()
        assert armed is not None, "this replacement exists only while the layer is armed"
        apply_flag(args, armed)
        return args

    return parse_args
