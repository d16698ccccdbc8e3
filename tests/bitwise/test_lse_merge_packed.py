"""Packed sequences get the bits that the same rows get in a dense batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from bits import assert_equal_bits
from te_overrides.kernels.lse_merge import packed, reference

LENGTHS = (8, 2, 0, 14)
HEADS, D, TAIL = 3, 16, 3
BOUNDS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
ROWS, LONGEST = int(BOUNDS[-1]), max(LENGTHS)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _per_sequence(lse: torch.Tensor, half: bool) -> torch.Tensor:
    """[h, T] -> [n, h, S] with NaN where no sequence has a row."""
    divisor = 2 if half else 1
    out = torch.full((len(LENGTHS), HEADS, LONGEST // divisor), torch.nan)
    for index, length in enumerate(LENGTHS):
        start = int(BOUNDS[index]) // divisor
        out[index, :, : length // divisor] = lse[:, start : start + length // divisor]
    return out


def _operands(half: bool) -> tuple[torch.Tensor, ...]:
    """lse [h, T], step lse, out [T, h, d], step out; a tail of rows that belong to nobody."""
    generator, tokens = _generator(), ROWS // 2 if half else ROWS
    lse, step = (torch.randn(HEADS, n, generator=generator) * 4 for n in (ROWS + TAIL, tokens + TAIL))
    out, step_out = (
        torch.randn(n, HEADS, D, generator=generator).bfloat16() for n in (ROWS + TAIL, tokens + TAIL)
    )
    step[0, 1] = -torch.inf
    return lse, step, out, step_out


def _runs(half: bool) -> list[tuple[slice, slice]]:
    """Rows of each sequence that the step holds, and the step's tokens."""
    runs = []
    for start, length in zip(BOUNDS[:-1].tolist(), LENGTHS, strict=True):
        if half:
            runs.append(
                (slice(start + length // 2, start + length), slice(start // 2, start // 2 + length // 2))
            )
        else:
            runs.append((slice(start, start + length), slice(start, start + length)))
    return runs


@pytest.mark.parametrize("lse_packed", [True, False])
def test_the_merge_of_second_halves_equals_the_dense_one(lse_packed: bool) -> None:
    lse, step, _, _ = _operands(half=True)
    want = lse.clone()
    for rows, tokens in _runs(half=True):
        part = want[:, rows].clone()
        reference.merge_lse_(part, step[:, tokens])
        want[:, rows] = part
    if lse_packed:
        got = lse.clone()
        packed.thd_second_half_merge_lse_(got, step, BOUNDS, True)
        assert_equal_bits(got, want, "packed LSE")
        assert_equal_bits(got[:, ROWS:], lse[:, ROWS:], "rows behind the last sequence")
    else:
        got = _per_sequence(lse, half=False)
        packed.thd_second_half_merge_lse_(got, _per_sequence(step, half=True), BOUNDS, False)
        assert_equal_bits(got, _per_sequence(want, half=False), "LSE by sequence")


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("lse_packed", [True, False])
def test_output_corrections_equal_the_dense_ones(half: bool, lse_packed: bool) -> None:
    lse, step, out, step_out = _operands(half)
    new = torch.randn(lse.shape, generator=_generator()) + 6
    shaped = [lse, new, step]
    if not lse_packed:
        shaped = [_per_sequence(lse, False), _per_sequence(new, False), _per_sequence(step, half)]
    for form in ("late", "incremental"):
        got, want = out.clone(), out.clone()
        for rows, tokens in _runs(half):
            if rows.start == rows.stop:
                continue
            part, dense = want[rows][None].clone(), [x[:, rows][None] for x in (lse, new)]
            if form == "late":
                reference.out_correction_(part, step_out[tokens][None], dense[1], step[:, tokens][None], 1)
            else:
                reference.incremental_out_correction_(
                    part, step_out[tokens][None], *dense, step[:, tokens][None], 1
                )
            want[rows] = part[0]
        if form == "late":
            packed.thd_out_correction_(got, step_out, *shaped[1:], BOUNDS, half, lse_packed)
        else:
            packed.thd_incremental_out_correction_(got, step_out, *shaped, BOUNDS, half, lse_packed)
        assert_equal_bits(got, want, f"{form}, second half {half}, packed LSE {lse_packed}")
        assert_equal_bits(got[ROWS:], out[ROWS:], "rows behind the last sequence")
