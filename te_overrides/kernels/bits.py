"""Counts the elements whose bits differ: the one comparison behind every "0 mismatches" this project prints.

A tolerance cannot see what this project removes: a truncated bf16 passes any ULP bound, and a last-bit
difference in a log-probability is the whole fault. So floating point is compared as integers of the same width.
`-0.0` and `+0.0` differ (an unowned gradient is `+0.0` by contract, a stray `-0.0` would be a broken owner), and
NaN equals NaN whatever its payload, since no operation promises a payload.

The quick start, the verification on a running job and the tests all count with this function, so a figure shown
by one means the same in the others.
"""

from __future__ import annotations

import torch

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ in bits.

    Args:
        got, want: tensors of equal shape and dtype, any strides. If they lie on different devices both are
            brought to the host; moving bytes does not change them.

    Returns:
        Boolean tensor of the shape of `got`; True where the bits differ and the two are not both NaN.

    Raises:
        ValueError: shapes or dtypes differ, so that no count of elements would mean anything.
    """
    if got.shape != want.shape:
        raise ValueError(
            f"cannot compare bits: got shape {tuple(got.shape)}, want shape {tuple(want.shape)}; "
            "gather or slice one of them to the layout of the other first"
        )
    if got.dtype != want.dtype:
        raise ValueError(
            f"cannot compare bits: got dtype {got.dtype}, want dtype {want.dtype}; "
            "a cast would hide the difference, so compare before casting"
        )
    got, want = got.detach(), want.detach()
    if got.device != want.device:
        got, want = got.cpu(), want.cpu()
    if got.is_complex():
        return differing(torch.view_as_real(got), torch.view_as_real(want)).any(dim=-1)
    if not got.is_floating_point():
        return got != want
    integer = _INTEGER_OF_WIDTH[got.element_size()]
    differs = got.contiguous().view(integer) != want.contiguous().view(integer)
    if not differs.any():
        return differs
    # float8 has no isnan of its own; widening keeps NaN.
    if got.element_size() == 1:
        got, want = got.float(), want.float()
    return differs & ~(got.isnan() & want.isnan())


def count_mismatches(got: torch.Tensor, want: torch.Tensor) -> tuple[int, int, tuple[int, ...] | None]:
    """Count the elements whose bits differ.

    Args:
        got, want: as for `differing`.

    Returns:
        (mismatched, total, first_index): how many of how many elements differ and the index of the first in
        row-major order, None when none does. A 0-d tensor has the first index ().

    Raises:
        ValueError: shapes or dtypes differ.
    """
    differs = differing(got, want)
    mismatched = int(differs.sum())
    if mismatched == 0:
        return 0, differs.numel(), None
    # argmax takes no bool; on equal values it returns some maximum, nonzero returns the first by definition.
    flat = int(differs.reshape(-1).nonzero()[0])
    first: list[int] = []
    for size in reversed(differs.shape):
        flat, position = divmod(flat, size)
        first.append(position)
    return mismatched, differs.numel(), tuple(reversed(first))
