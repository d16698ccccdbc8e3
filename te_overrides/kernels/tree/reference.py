"""The balanced tree of docs/numbers.md, in plain torch.

Floating-point addition is not associative, so "the sum of n terms" names no value until an order is given. The
order here is a tree that depends on n alone: level by level, neighbours pair up, a last odd term is carried to the
next level unchanged, and every add is rounded once in the dtype of the terms.

    n = 8   ((x0+x1)+(x2+x3)) + ((x4+x5)+(x6+x7))
    n = 5   ((x0+x1)+(x2+x3)) + x4
    n = 3   (x0+x1) + x2

A tree over a power of two nests: the tree over eight equals the tree over two of the trees over four. A rank can
therefore finish the lower levels alone and a collective the upper ones.

`torch.sum` promises none of this: its order follows the shape, the strides and the number of threads. Elementwise
`+` on tensors is one IEEE add per element whatever the shape. For bfloat16 and float16 torch adds in float32 and
rounds the result; float32 carries at least 2p + 2 bits of either, so the double rounding equals a single one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from te_overrides.kernels.eager import eager_only


@eager_only
def balanced_tree(terms: Sequence[Tensor]) -> Tensor:
    """Add terms of one shape and one dtype by the balanced tree.

    Args:
        terms: at least one tensor; all of the same shape, dtype and device.

    Returns:
        The sum, in the dtype of the terms. A single term is returned as it is, not copied.

    Raises:
        ValueError: no terms, or terms whose shapes or dtypes differ (broadcasting or promotion would hide a term
            that is not what the caller meant).
    """
    if not terms:
        raise ValueError(
            "balanced_tree: no terms; an empty sum has no dtype or shape to take, pass at least one"
        )
    first = terms[0]
    for index, term in enumerate(terms):
        if term.shape != first.shape or term.dtype != first.dtype:
            raise ValueError(
                f"balanced_tree: term {index} is {term.dtype} {tuple(term.shape)}, "
                f"term 0 is {first.dtype} {tuple(first.shape)}; all terms must have one shape and one dtype"
            )
    level = list(terms)
    while len(level) > 1:
        paired = [left + right for left, right in zip(level[0::2], level[1::2], strict=False)]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return level[0]


@eager_only
def balanced_tree_dim(x: Tensor, dim: int) -> Tensor:
    """Add the slices of `x` along `dim` by the balanced tree, a level at a time over all elements at once.

    Args:
        x: any shape, any floating or integer dtype; at least one slice along `dim`.
        dim: the dimension to add over; it is removed, as in `torch.sum(x, dim)`.

    Returns:
        A tensor of `x`'s dtype without `dim`, bit for bit `balanced_tree(x.unbind(dim))`.

    Raises:
        ValueError: the dimension has no slices.
    """
    if x.shape[dim] == 0:
        raise ValueError(
            f"balanced_tree_dim: dimension {dim} of {tuple(x.shape)} is empty; an empty sum is refused"
        )
    level = x.movedim(dim, 0)
    while level.shape[0] > 1:
        count = level.shape[0]
        paired = level[0 : count - 1 : 2] + level[1:count:2]
        level = torch.cat([paired, level[-1:]]) if count % 2 else paired
    return level[0]
