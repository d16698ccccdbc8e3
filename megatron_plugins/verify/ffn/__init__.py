"""``verify ffn``: the deterministic feed-forward block against itself on one rank, in every layout."""
