"""Sums over tokens for vector gradients (docs/numbers.md, "Tokens").

A granule is 16 consecutive positions of one sequence. Its partial is a float32 chain over its tokens, ascending (and,
inside a token, over the heads of one KV group). Partials of all granules are then added by one balanced tree, in
canonical order: sequence, granule, KV group. Granules, not ranks, are the leaves, so neither CP nor SP can move a
bracket of the sum.
"""

from __future__ import annotations

import torch

from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.tree.reference import balanced_tree_dim

GRANULE = 16
"""Consecutive positions that one float32 chain covers."""


class GranuleError(ValueError):
    """A granule would straddle ranks."""


def check_run(positions: int, shared: bool, what: str) -> None:
    """A rank's run of consecutive positions must be whole granules when ranks share the tokens.

    Raises:
        GranuleError: `positions` is no multiple of 16 although `shared`.
    """
    if shared and positions % GRANULE:
        raise GranuleError(
            f"{what}: a rank holds a run of {positions} consecutive positions, which is no multiple of the granule "
            f"of {GRANULE}. Sums over tokens would depend on the layout. Pad the sequence so that every run is a "
            f"multiple of {GRANULE}."
        )


@eager_only
def granule_partials(terms: torch.Tensor) -> torch.Tensor:
    """Chain inside every granule.

    Args:
        terms: [S, B, *inner, C] float32, or 16 bits, which are widened; positions ascending along dim 0. `inner` is
            empty, or (groups, heads) for q/k-norm: then the chain runs token by token and head by head inside a token.

    Returns:
        [ceil(S / 16), B, C] or [ceil(S / 16), B, groups, C] float32.
    """
    count = -(-terms.shape[0] // GRANULE)
    tail = terms.shape[0] - (count - 1) * GRANULE
    shape = (count, *terms.shape[1:-2], terms.shape[-1]) if terms.dim() > 3 else (count, *terms.shape[1:])
    acc = torch.zeros(shape, dtype=torch.float32, device=terms.device)
    for t in range(GRANULE):
        # Granules whose t-th position exists: all, or all but a short last one.
        present = count if t < tail else count - 1
        if not present:
            break
        rows = terms[t::GRANULE][:present]
        if terms.dim() == 3:
            acc[:present].add_(rows)
        else:
            for head in range(terms.shape[-2]):
                acc[:present].add_(rows[..., head, :])
    return acc


@eager_only
def sum_granules(partials: torch.Tensor) -> torch.Tensor:
    """The balanced tree over all granules in canonical order.

    Args:
        partials: [granules of a sequence, B, *groups, C] float32, granules ascending in position.

    Returns:
        [C] float32; C may be 0, as where there are fewer columns than ranks.
    """
    # Flattened, not reshaped to -1 rows: a rank may own no column.
    return balanced_tree_dim(partials.transpose(0, 1).flatten(0, -2), 0)
