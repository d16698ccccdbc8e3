"""``python -m megatron_plugins.verify attention``: attention alone, in every layout, over real process groups."""
