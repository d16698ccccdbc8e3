"""Collectives move bytes; sums over ranks are trees added locally."""
