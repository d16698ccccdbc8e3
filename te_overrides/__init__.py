"""Overrides of TransformerEngine, AITER and apex symbols, and the kernels that serve them."""
