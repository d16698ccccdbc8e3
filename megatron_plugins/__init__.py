"""Megatron-facing modules, layer specs, collectives and verification."""
