"""Modules of the deterministic layer spec. Each subclasses Megatron's own, so names, shapes, initialization and
checkpoints are upstream's; only the arithmetic in ``forward`` and ``backward`` is replaced."""
