"""How context parallelism lays positions of a sequence over ranks, and the way back."""
