"""Launches the portable attention kernels: the reference's functions over position maps, on a GPU.

Shapes are the reference's: rows first, `[s, b, h, d]`, statistics `[b, h, s]`. `ops.py` chooses between the two.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import triton

from te_overrides.kernels import launching
from te_overrides.kernels.architecture import architecture, has_hopper_kernels
from te_overrides.kernels.attention import kernel_backward, kernel_forward
from te_overrides.kernels.attention.coverage import require_covered
from te_overrides.kernels.attention.launch_table import Entries, Launch, entries_for, padded
from te_overrides.kernels.attention.reference import Mask
from te_overrides.kernels.attention.runs import Run, covered, reach, work_table
from te_overrides.kernels.launching import Launcher, entry_options

_forward = Launcher(kernel_forward.forward_kernel)
_statistics = Launcher(kernel_backward.statistics_kernel)
_dq = Launcher(kernel_backward.dq_kernel)
_dkv = Launcher(kernel_backward.dkv_kernel)

STATISTICS_ROWS, STATISTICS_THREADS = 32, 128
# Up to so many rows of a tile the heads of a group share it: decode, and chunks of a few tokens.
DECODE_ROWS = 64


def options(entry: Launch, hip: bool) -> dict[str, Any]:
    """Compiler options of a launch entry: what is rounded once is written so."""
    return entry_options(entry, hip) | {"enable_fp_fusion": False}


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: tuple[Run, ...],
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    entries: Entries | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention_forward` over runs of query rows. Rows that no run maps are 0, their LSE -inf.

    Args:
        entries: portable launches to use instead of the table's and of the Hopper kernels; for checks of one class.

    Raises:
        KernelCoverageError: what the kernels do not cover.
        NoAttentionLaunchError: a GPU without a certified entry.
    """
    problem = require_covered(query, key, value, softmax_scale)
    query, key, value = (_unit_columns(x) for x in (query, key, value))
    (s_q, batch, heads, d), (_, _, groups, d_v) = query.shape, value.shape
    whole = covered(runs) == s_q
    new = query.new_empty if whole else query.new_zeros
    out = new(s_q, batch, heads, d_v)
    lse = query.new_empty(batch, heads, s_q, dtype=torch.float32)
    if not whole:
        lse.fill_(-torch.inf)
    per_group = heads // groups
    rows = max((run.count for run in runs), default=0)
    if rows * per_group > DECODE_ROWS and (fast := _hopper(entries, query, key, value)):
        fast.forward(query, key, value, out, lse, runs, reach(mask), problem)
        return out, lse
    entries = entries or entries_for(architecture(query.device), d)
    entry, pack = _launch_of(entries, rows, per_group)
    left, right = reach(mask)
    work = work_table(runs, entry.rows // pack, left, right, query.device)
    if work is None or not batch:
        return out, lse
    _forward(
        (work.shape[0], heads // pack, batch),
        (query, key, value, out, lse, work, work),
        (
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            s_q, heads, 0, 1, left, right, problem.score_scale,
        ),
        {
            "GROUP": per_group, "PACK": pack, "PAGED": False,
            "BRANCH": entry.branch, "TAIL": _has_tail(runs, entry.columns, problem.hip),
            "BM": entry.rows, "BN": entry.columns, **_columns(d, d_v),
        },
        options(entry, problem.hip),
    )  # fmt: skip
    return out, lse


def attention_statistics(
    grad_out: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backward kernels read of a query row: shift and delta (`kernel_backward.statistics_kernel`).

    Returns:
        [b, h, s] float32 each; delta has the bits of `reference.attention_delta`.
    """
    grad_out, out, softmax_lse = _unit_columns(grad_out), _unit_columns(out), softmax_lse.contiguous()
    rows, batch, heads, d_v = out.shape
    shift, delta = torch.empty_like(softmax_lse), torch.empty_like(softmax_lse)
    if not delta.numel():
        return shift, delta
    _statistics(
        (triton.cdiv(rows, STATISTICS_ROWS), heads, batch),
        (grad_out, out, softmax_lse, shift, delta),
        (*grad_out.stride()[:3], *out.stride()[:3], rows, heads),
        {"ROWS": STATISTICS_ROWS, "LEVELS": padded(d_v).bit_length() - 1, "DV": d_v, "DV_PAD": padded(d_v)},
        launching.options(STATISTICS_THREADS),
    )
    return shift, delta


def attention_dq(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    runs: tuple[Run, ...],
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    entries: Entries | None = None,
) -> torch.Tensor:
    """`reference.attention_dq` over runs of query rows; rows that no run maps are 0. Raises as `attention_forward`."""
    problem = require_covered(query, key, value, softmax_scale, grad_out)
    query, key, value, grad_out = (_unit_columns(x) for x in (query, key, value, grad_out))
    shift, delta = shift.contiguous(), delta.contiguous()
    (s_q, batch, heads, d), (_, _, groups, d_v) = query.shape, value.shape
    dq = (query.new_empty if covered(runs) == s_q else query.new_zeros)(query.shape)
    if fast := _hopper(entries, query, key, value, grad_out):
        fast.dq(query, key, value, grad_out, shift, delta, dq, runs, reach(mask), problem)
        return dq
    entry = (entries or entries_for(architecture(query.device), d)).dq
    left, right = reach(mask)
    work = work_table(runs, entry.rows, left, right, query.device)
    if work is None or not batch:
        return dq
    _dq(
        (work.shape[0], heads, batch),
        (query, key, value, grad_out, shift, delta, dq, work),
        (
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3], *dq.stride()[:3],
            s_q, heads, left, right, problem.score_scale, problem.softmax_scale,
        ),
        {
            "GROUP": heads // groups, "BRANCH": entry.branch,
            "TAIL": _has_tail(runs, entry.columns, problem.hip), "BM": entry.rows, "BN": entry.columns,
            **_columns(d, d_v), "HIP": problem.hip,
        },
        options(entry, problem.hip),
    )  # fmt: skip
    return dq


def attention_dkv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    runs: tuple[Run, ...],
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    entries: Entries | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention_dkv` over runs of key rows; `origin` and `length` of a run name the sequence's queries.

    Rows that no run maps are 0. Raises as `attention_forward`.
    """
    problem = require_covered(query, key, value, softmax_scale, grad_out)
    query, key, value, grad_out = (_unit_columns(x) for x in (query, key, value, grad_out))
    shift, delta = shift.contiguous(), delta.contiguous()
    (s_q, batch, heads, d), (s_k, _, groups, d_v) = query.shape, value.shape
    new = key.new_empty if covered(runs) == s_k else key.new_zeros
    dk, dv = new(key.shape), new(value.shape)
    if fast := _hopper(entries, query, key, value, grad_out):
        fast.dkv(query, key, value, grad_out, shift, delta, dk, dv, runs, reach(mask), problem)
        return dk, dv
    entry = (entries or entries_for(architecture(query.device), d)).dkv
    left, right = reach(mask)
    work = work_table(runs, entry.rows, right, left, query.device)
    if work is None or not batch:
        return dk, dv
    _dkv(
        (work.shape[0], groups, batch),
        (query, key, value, grad_out, shift, delta, dk, dv, work),
        (
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3],
            *dk.stride()[:3], *dv.stride()[:3],
            s_q, heads, left, right, problem.score_scale, problem.softmax_scale,
        ),
        {
            "GROUP": heads // groups, "BRANCH": entry.branch,
            "TAIL": _has_tail(runs, entry.columns, problem.hip), "BK": entry.rows, "BQ": entry.columns,
            **_columns(d, d_v), "HIP": problem.hip,
        },
        options(entry, problem.hip),
    )  # fmt: skip
    return dk, dv


def _hopper(entries: Entries | None, *operands: torch.Tensor) -> ModuleType | None:
    """The Hopper kernels (the same bits) where they cover the operands and no portable entries are asked for."""
    if entries is not None or not has_hopper_kernels(operands[0].device):
        return None
    from te_overrides.kernels.attention import hopper

    return hopper if hopper.covers(*operands) else None


@functools.lru_cache(maxsize=256)
def _has_tail(runs: tuple[Run, ...], tile: int, hip: bool) -> bool:
    """Whether a sequence may end inside a tile. Free of bits; on AMD always said so, where one code was certified."""
    return hip or any(run.length % tile for run in runs)


def _columns(d: int, d_v: int) -> dict[str, int]:
    return {"D": d, "D_PAD": padded(d), "DV": d_v, "DV_PAD": padded(d_v)}


def _unit_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def paged_forward(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    entries: Entries | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last rows of every sequence over pages read where they lie; nothing waits for the host.

    Args:
        query: [b, s_q, h, d]; row i of sequence n is at position `seq_lens[n] - s_q + i`.
        key_cache, value_cache: [pages, page_size, h_kv, d or d_v], pages one after the other in memory.
        block_table: integer [b, max_pages]; seq_lens: integer [b], both on the device.

    Returns:
        out [b, s_q, h, d_v] and LSE [b, h, s_q], the bits of `attention_forward` over the same keys.

    Raises:
        KernelCoverageError, NoAttentionLaunchError: as `attention_forward`.
    """
    batch, s_q, heads, d = query.shape
    page_size, groups, d_v = value_cache.shape[1:]
    keys, values = (_unit_columns(cache).flatten(0, 1).unsqueeze(1) for cache in (key_cache, value_cache))
    rows = _unit_columns(query).reshape(batch * s_q, 1, heads, d)
    problem = require_covered(rows, keys, values, softmax_scale)
    out = query.new_empty(batch * s_q, 1, heads, d_v)
    lse = query.new_empty(1, heads, batch * s_q, dtype=torch.float32)
    if not rows.numel():
        return out.view(batch, s_q, heads, d_v), lse.view(heads, batch, s_q).transpose(0, 1)
    entries = entries or entries_for(architecture(query.device), d)
    entry, pack = _launch_of(entries, s_q, heads // groups)
    left, right = reach(mask)
    table = block_table.to(torch.int32).contiguous()
    work = _paged_work(seq_lens, s_q, entry.rows // pack)
    _forward(
        (work.shape[0], heads // pack, 1),
        (rows, keys, values, out, lse, work, table),
        (
            *rows.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:3],
            batch * s_q, heads, table.stride(0), page_size, left, right, problem.score_scale,
        ),
        {
            "GROUP": heads // groups, "PACK": pack, "PAGED": True, "BRANCH": entry.branch, "TAIL": True,
            "BM": entry.rows, "BN": entry.columns, **_columns(d, d_v),
        },
        options(entry, problem.hip),
    )  # fmt: skip
    return out.view(batch, s_q, heads, d_v), lse.view(heads, batch, s_q).transpose(0, 1)


def _launch_of(entries: Entries, rows: int, per_group: int) -> tuple[Launch, int]:
    """The forward entry for so many rows of a sequence, and how many heads share its tile."""
    if per_group <= entries.decode.rows and rows * per_group <= DECODE_ROWS:
        return entries.decode, per_group
    return entries.forward, 1


def _paged_work(seq_lens: torch.Tensor, s_q: int, tile: int) -> torch.Tensor:
    """`runs.work_table` made on the device: `origin` is a line of the block table."""
    lengths = seq_lens.to(torch.int32)
    starts = torch.arange(0, s_q, tile, dtype=torch.int32, device=lengths.device)
    sequence = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)[:, None]
    lines = (
        sequence * s_q + starts,
        (s_q - starts).clamp(max=tile),
        lengths[:, None] - s_q + starts,
        sequence,
        lengths[:, None],
    )
    return torch.stack(torch.broadcast_tensors(*lines), -1).flatten(0, 1)
