"""Merging the partial softmax results of context parallelism (docs/numbers.md, LSE merge)."""
