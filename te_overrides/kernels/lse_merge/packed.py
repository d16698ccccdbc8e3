"""The merge for packed sequences (thd), with the bits of the dense forms.

TransformerEngine does this in C++ (`tex.thd_second_half_lse_correction`, `tex.thd_out_correction`) with the library's
log1pf and expf and a compiler free to contract, so dense and packed batches of one model differ. Here packed rows go
through the very functions of the dense forms: positions are computed in integers, rows are moved, and what a row gets
is what a dense batch would have given it.

Shapes, as upstream passes them, T rows on this rank, those of each sequence in one run:

* `cu_seqlens` [n + 1] int32, boundaries of the (padded) sequences in these T rows; every length even.
* LSE: packed [h, T], or [n, h, S] with S at least the longest sequence.
* the step's LSE and output: of all rows, or of the second half of every sequence ([h, T/2], [n, h, S/2], [T/2, h, d]).
* `out` [T, h, d].

Rows behind the last boundary are left alone. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_overrides.kernels.lse_merge import ops


def thd_second_half_merge_lse_(
    softmax_lse: torch.Tensor, softmax_lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool
) -> None:
    """`merge_lse_` for the second half of every packed sequence, in place."""
    if lse_packed:
        rows = _Rows.of(cu_seqlens, softmax_lse.shape[-1], second_half=True)
        step = softmax_lse_per_step[:, rows.at(softmax_lse_per_step.shape[-1])]
        covered = rows.covered
    else:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()[:, None, None]
        column = torch.arange(softmax_lse.shape[-1], device=softmax_lse.device)
        covered = (column >= lengths // 2) & (column < lengths)
        index = (column - lengths // 2).clamp(0, softmax_lse_per_step.shape[-1] - 1)
        step = softmax_lse_per_step.gather(-1, index.expand(softmax_lse.shape))
    merged = softmax_lse.clone()
    ops.merge_lse_(merged, step)
    softmax_lse.copy_(torch.where(covered, merged, softmax_lse))


def thd_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """`out_correction_` for packed sequences, in place (TransformerEngine up to 2.19)."""
    rows = _Rows.of(cu_seqlens, out.shape[0], only_second_half)
    total = rows.lse_of_rows(softmax_lse, lse_packed, of_step=False)
    step = rows.lse_of_rows(softmax_lse_per_step, lse_packed, of_step=True)
    corrected = out.clone()
    ops.out_correction_(corrected[None], out_per_step[rows.at(out_per_step.shape[0])][None], total, step, 1)
    out.copy_(torch.where(rows.covered[:, None, None], corrected, out))


def thd_incremental_out_correction_(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_softmax_lse: torch.Tensor,
    new_softmax_lse: torch.Tensor,
    softmax_lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """`incremental_out_correction_` for packed sequences, in place (TransformerEngine from 2.20)."""
    rows = _Rows.of(cu_seqlens, out.shape[0], only_second_half)
    old, new = (rows.lse_of_rows(x, lse_packed, of_step=False) for x in (old_softmax_lse, new_softmax_lse))
    step = rows.lse_of_rows(softmax_lse_per_step, lse_packed, of_step=True)
    corrected = out.clone()
    step_rows = out_per_step[rows.at(out_per_step.shape[0])]
    ops.incremental_out_correction_(corrected[None], step_rows[None], old, new, step, 1)
    out.copy_(torch.where(rows.covered[:, None, None], corrected, out))


@dataclass(frozen=True)
class _Rows:
    """What each of the T rows of a rank is in its step.

    Attributes:
        covered: bool [T], whether the step holds the row.
        token: int64 [T], the row's number among the step's tokens.
        sequence, column: int64 [T], the row's sequence and its position in it.
        step_column: int64 [T], its position among the step's tokens of its sequence.
    """

    covered: torch.Tensor
    token: torch.Tensor
    sequence: torch.Tensor
    column: torch.Tensor
    step_column: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, rows: int, second_half: bool) -> _Rows:
        bounds = cu_seqlens.long()
        row = torch.arange(rows, device=bounds.device)
        sequence = torch.searchsorted(bounds[1:], row, right=True).clamp(max=bounds.numel() - 2)
        start, stop = bounds[sequence], bounds[sequence + 1]
        # The step's tokens are numbered without the first halves before them.
        skipped = stop // 2 if second_half else torch.zeros_like(row)
        first = (stop - start) // 2 if second_half else torch.zeros_like(row)
        column = row - start
        covered = (row < bounds[-1]) & (column >= first)
        return cls(covered, row - skipped, sequence, column, column - first)

    def at(self, tokens: int) -> torch.Tensor:
        """Index of each row among the step's tokens; rows that are not covered point anywhere inside."""
        return self.token.clamp(0, tokens - 1)

    def lse_of_rows(self, lse: torch.Tensor, lse_packed: bool, of_step: bool) -> torch.Tensor:
        """[1, h, T] from a packed or a per-sequence LSE of all rows or of the step."""
        if lse_packed:
            return (lse[:, self.at(lse.shape[-1])] if of_step else lse)[None]
        column = (self.step_column if of_step else self.column).clamp(0, lse.shape[-1] - 1)
        return lse[self.sequence, :, column].t()[None]
