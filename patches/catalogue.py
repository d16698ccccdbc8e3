"""Modules that declare overrides. Names only: they are imported when the layer is armed, and import no torch then."""

from __future__ import annotations

import importlib

DECLARATIONS = (
    "megatron_plugins.overrides.rope",
    "megatron_plugins.overrides.block_final_norm",
    "megatron_plugins.overrides.gpt_model",
    "megatron_plugins.overrides.language_model_loss",
    "megatron_plugins.overrides.grad_norm",
    "megatron_plugins.overrides.megatron_parse_args",
    "megatron_plugins.overrides.megatron_validate_args",
)


def declare_all() -> None:
    """Import every declaring module once."""
    for name in DECLARATIONS:
        importlib.import_module(name)
