"""Checks on a running installation that its bits are what the contract says: ``python -m megatron_plugins.verify``."""
