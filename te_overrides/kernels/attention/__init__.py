"""Attention whose bits depend on a row's position in its sequence alone (docs/attention.md)."""
