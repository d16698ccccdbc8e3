"""`reference.py` as Triton kernels: the chains inside granules, and the tree over all of them.

The tree of a power of two nests, and -0 is the one number that changes no sum. So a program takes 2^LEVELS consecutive
granules of some columns and leaves one row, and the rows of all programs are added the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_overrides.kernels.granules.reference import GRANULE
from te_overrides.kernels.launching import Launch, Plans, device_of, options, signature
from te_overrides.kernels.tree.kernel import tree_of_rows

MOST_LEVELS, ELEMENTS, MOST_COLUMNS, THREADS = 9, 8192, 64, 256
CHAIN_COLUMNS, CHAIN_THREADS = 512, 128

_plans = Plans()


@triton.jit
def chain_kernel(
    terms_ptr, out_ptr, positions, inners, columns, COLUMNS: tl.constexpr, GRANULE: tl.constexpr
):
    """terms [positions, inners, columns] contiguous -> [granules, inners, columns] float32."""
    granule = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)  # [C]
    sums = tl.zeros((COLUMNS,), tl.float32)
    for step in range(GRANULE):
        position = granule * GRANULE + step
        row = position * inners + tl.program_id(1)
        inside = (column < columns) & (position < positions)
        term = tl.load(terms_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        sums = tl.where(position < positions, sums + term, sums)
    chain = granule * inners + tl.program_id(1)
    tl.store(out_ptr + chain * columns + column, sums, mask=column < columns)


@triton.jit
def tree_kernel(
    x_ptr, out_ptr, terms, columns, groups, terms_of_a_sequence, granule_stride,
    LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x [granules, sequences, groups, columns] -> one row a program, of 2^LEVELS terms in canonical order.

    Canonical is sequence, granule, group; `granule_stride` is elements between granules.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [C]
    term = tl.program_id(0) * 2**LEVELS + tl.arange(0, 2**LEVELS)  # [N]
    # Divided in 32 bits, which are enough for the number of terms, not for their places.
    granule = (term % terms_of_a_sequence) // groups
    chain = (term // terms_of_a_sequence) * groups + term % groups
    at = granule.to(tl.int64) * granule_stride + chain.to(tl.int64) * columns
    mask = (column < columns)[:, None] & (term < terms)[None, :]
    x = tl.load(x_ptr + column[:, None] + at[None, :], mask=mask, other=-0.0)
    row = tl.program_id(0).to(tl.int64) * columns
    tl.store(out_ptr + row + column, tree_of_rows(x, LEVELS), mask=column < columns)


def granule_partials(terms: torch.Tensor) -> torch.Tensor:
    """`reference.granule_partials` of [S, B, C] on a GPU; terms of 16 bits are widened, which is exact."""
    if terms.dim() != 3:
        raise ValueError(
            f"granules: terms of shape {tuple(terms.shape)}; the kernel chains [S, B, C]. Norms over heads leave "
            "partials of their own."
        )
    terms = terms.contiguous()
    positions, batch, columns = terms.shape
    out = torch.empty(
        triton.cdiv(positions, GRANULE), batch, columns, dtype=torch.float32, device=terms.device
    )
    if out.numel():
        launch = _plans(("chain", terms.device, signature(terms)), _plan_chain, positions, batch, columns)
        with device_of(terms):
            launch(terms, out)
    return out


def _plan_chain(positions: int, batch: int, columns: int) -> Launch:
    return Launch(
        chain_kernel,
        (triton.cdiv(positions, GRANULE), batch, triton.cdiv(columns, CHAIN_COLUMNS)),
        (positions, batch, columns),
        {"COLUMNS": CHAIN_COLUMNS, "GRANULE": GRANULE},
        options(CHAIN_THREADS),
    )


def sum_granules(partials: torch.Tensor) -> torch.Tensor:
    """`reference.sum_granules` on a GPU: [granules, B, *groups, C] float32 -> [C]."""
    if partials.dtype != torch.float32 or partials.dim() not in (3, 4) or 0 in partials.shape[:-1]:
        raise ValueError(
            f"granules: partials are {partials.dtype} {tuple(partials.shape)}; the tree adds float32 [granules, B, C] "
            "or [granules, B, groups, C], of which there is at least one"
        )
    partials = partials.contiguous()
    granules, batch, *groups, columns = partials.shape
    if not columns:
        return partials.new_empty(0)
    x = _tree(partials, granules, batch, groups[0] if groups else 1)
    while x.shape[0] > 1:
        x = _tree(x, x.shape[0], 1, 1)
    return x.view(columns)


def _tree(x: torch.Tensor, granules: int, batch: int, groups: int) -> torch.Tensor:
    """One level of programs: a row for every 2^MOST_LEVELS terms."""
    columns, terms = x.shape[-1], granules * batch * groups
    levels = min(MOST_LEVELS, (terms - 1).bit_length())
    out = torch.empty(triton.cdiv(terms, 1 << levels), columns, dtype=torch.float32, device=x.device)
    key = ("tree", x.device, signature(x), batch, groups)
    launch = _plans(key, _plan_tree, granules, batch, groups, columns, levels)
    with device_of(x):
        launch(x, out)
    return out


def _plan_tree(granules: int, batch: int, groups: int, columns: int, levels: int) -> Launch:
    terms = granules * batch * groups
    width = min(triton.next_power_of_2(columns), ELEMENTS >> levels, MOST_COLUMNS)
    return Launch(
        tree_kernel,
        (triton.cdiv(terms, 1 << levels), triton.cdiv(columns, width), 1),
        (terms, columns, groups, granules * groups, batch * groups * columns),
        {"LEVELS": levels, "COLUMNS": width},
        options(THREADS),
    )
