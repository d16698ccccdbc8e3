"""Overrides of megatron.core symbols that lie outside the layer spec. One file an override."""
