"""Sums and exchanges over Megatron's process groups: what moves, who owns, in which order it is added."""
