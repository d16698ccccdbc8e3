"""Elementwise functions whose bits are the same on every device (docs/numbers.md, Portable math)."""
