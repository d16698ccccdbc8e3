"""Launches the Hopper kernels. They have the bits of the portable ones, so which of the two runs is a matter of speed.

`covers` says what they take: head dimensions 64 and 128, equal for queries and values, and operands that TMA can read.
Everything else the portable kernels do, on the same GPU, in the same numerics class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from te_overrides.kernels.attention.coverage import Problem
from te_overrides.kernels.attention.hopper_dkv import hopper_dkv_kernel
from te_overrides.kernels.attention.hopper_dq import hopper_dq_kernel
from te_overrides.kernels.attention.hopper_forward import hopper_forward_kernel
from te_overrides.kernels.attention.runs import FAR, Run, work_table
from te_overrides.kernels.launching import LIMIT
from te_overrides.kernels.tensor_maps import Descriptor

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class HopperLaunch:
    """Buffers of a ring and registers of a computing thread; free of bits.

    Attributes:
        columns: rows of the other side in a tile: keys, or queries in dK, dV. In the forward pass part of the class.
    """

    columns: int
    stages: int
    registers: int = 240


# head dimension -> forward, dQ, dK with dV
TABLE = {
    64: (HopperLaunch(128, 3), HopperLaunch(128, 2), HopperLaunch(64, 3)),
    128: (HopperLaunch(128, 2), HopperLaunch(128, 2), HopperLaunch(64, 2)),
}
ROWS = 128
"""Rows of a tile, in two warpgroups of 64."""


def covers(*operands: torch.Tensor) -> bool:
    """Whether these operands [s, b, h, d] can be read by the Hopper kernels."""
    d = operands[0].shape[-1]
    return d in TABLE and all(x.shape[-1] == d and _readable(x) for x in operands)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    runs: tuple[Run, ...],
    reach: tuple[int, int],
    problem: Problem,
) -> None:
    """Rows of `runs` into `out` and `lse`; operands as `covers` admitted them, `out` contiguous."""
    (s_q, batch, heads, d), groups = query.shape, key.shape[2]
    launch = TABLE[d][0]
    work = work_table(runs, ROWS, *reach, query.device)
    if work is None or not batch:
        return
    query, key, value = (_rows_apart(x) for x in (query, key, value))
    total = work.shape[0] * heads * batch
    _forward(
        query.device,
        min(_multiprocessors(query.device), total),
        (
            _descriptor(query, 64),
            _descriptor(key, launch.columns),
            _descriptor(value, launch.columns),
            _descriptor(out, 64),
        ),
        (out, lse, work),
        (
            total, heads, heads * batch, s_q, *reach,
            *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3],
            problem.score_scale,
        ),
        {
            "GROUP": heads // groups, "WINDOW": reach[0] < FAR,
            "TAIL": _has_tail(runs, launch.columns, key.shape[0]),
            "BN": launch.columns, "D": d, "ST": launch.stages, "REGISTERS": launch.registers,
        },
    )  # fmt: skip


def dq(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    into: torch.Tensor,
    runs: tuple[Run, ...],
    reach: tuple[int, int],
    problem: Problem,
) -> None:
    """Rows of `runs` of dQ into `into`."""
    (s_q, batch, heads, d), groups = query.shape, key.shape[2]
    launch = TABLE[d][1]
    work = work_table(runs, ROWS, *reach, query.device)
    if work is None or not batch:
        return
    query, key, value, grad_out = (_rows_apart(x) for x in (query, key, value, grad_out))
    total = work.shape[0] * heads * batch
    _dq(
        query.device,
        min(_multiprocessors(query.device), total),
        (
            _descriptor(query, 64),
            _descriptor(grad_out, 64),
            _descriptor(key, launch.columns),
            _descriptor(value, launch.columns),
            _descriptor(into, 64),
        ),
        (shift, delta, into, work),
        (
            total, heads, heads * batch, s_q, *reach,
            *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], *grad_out.stride()[1:3],
            problem.score_scale, problem.softmax_scale,
        ),
        {
            "GROUP": heads // groups, "WINDOW": reach[0] < FAR,
            "TAIL": _has_tail(runs, launch.columns, key.shape[0]),
            "BN": launch.columns, "D": d, "ST": launch.stages, "REGISTERS": launch.registers,
        },
    )  # fmt: skip


def dkv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    runs: tuple[Run, ...],
    reach: tuple[int, int],
    problem: Problem,
    keys: int | None = None,
) -> None:
    """Key rows of `runs` into `dk` and `dv`.

    Args:
        reach: of the mask; a key sees it from the other side.
        keys: of one program, 64 or 128; chosen by how many programs there are unless given.
    """
    (s_q, batch, heads, d), groups = query.shape, key.shape[2]
    launch = TABLE[d][2]
    left, right = reach
    programs = _multiprocessors(query.device)
    if keys is None:
        tiles = sum(-(-run.count // ROWS) for run in runs)
        keys = ROWS if tiles * groups * batch >= programs else 64
    work = work_table(runs, keys, right, left, query.device)
    if work is None or not batch:
        return
    query, key, value, grad_out = (_rows_apart(x) for x in (query, key, value, grad_out))
    total = work.shape[0] * groups * batch
    count = keys // 64
    spread = 0
    if s_q % 4 or _has_odd_origin(runs):
        spread = -(-(shift.numel() + 4) // 4) * 4
        shift, delta = _copies(shift, spread), _copies(delta, spread)
    _dkv(
        query.device,
        # One warpgroup a program leaves room for two programs on a multiprocessor.
        min(programs * (3 - count), total),
        (
            _descriptor(query, launch.columns),
            _descriptor(grad_out, launch.columns),
            _descriptor(key, 64),
            _descriptor(value, 64),
            _line(shift, launch.columns),
            _line(delta, launch.columns),
            _descriptor(dk, 64),
            _descriptor(dv, 64),
        ),
        (dk, dv, work),
        (
            total, heads, groups, groups * batch, s_q, spread, left, right,
            *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], *grad_out.stride()[1:3],
            problem.score_scale, problem.softmax_scale,
        ),
        {
            "GROUP": heads // groups, "END": left < FAR or _is_short(runs, launch.columns),
            "TAIL": _has_tail(runs, launch.columns, query.shape[0]), "COUNT": count,
            "BQ": launch.columns, "D": d, "ST": launch.stages, "REGISTERS": launch.registers,
        },
    )  # fmt: skip


class _Launcher:
    """As `Launcher`, for kernels whose first parameters are tensor descriptors."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        device: torch.device,
        programs: int,
        descriptors: Sequence[Descriptor],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int | float],
        constants: dict[str, Any],
    ) -> None:
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(device, programs, descriptors, tensors, numbers, constants)
            return
        key = (
            device.index,
            # The block of a descriptor follows from the constants.
            descriptors[0].base.dtype,
            *[x.data_ptr() % 16 for x in tensors],
            *numbers,
            *constants.values(),
        )
        compiled = self._known.get(key)
        if compiled is None:
            if len(self._known) >= LIMIT:
                self._known.clear()
            examined = [descriptor.examined() for descriptor in descriptors]
            self._known[key] = self.function[(programs,)](
                *examined, *tensors, *numbers, **constants, num_warps=4, enable_fp_fusion=False
            )
        else:
            compiled[(programs, 1, 1)](*descriptors, *tensors, *numbers, *constants.values())


_forward, _dq, _dkv = (
    _Launcher(kernel) for kernel in (hopper_forward_kernel, hopper_dq_kernel, hopper_dkv_kernel)
)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=256)
def _has_tail(runs: tuple[Run, ...], tile: int, rows: int) -> bool:
    """Whether a sequence ends inside a tile with other rows behind it; behind the whole tensor TMA reads zeros."""
    return any(run.length % tile and run.origin + run.length < rows for run in runs)


@functools.lru_cache(maxsize=256)
def _is_short(runs: tuple[Run, ...], tile: int) -> bool:
    """Whether the last tile of a sequence is not full."""
    return any(run.length % tile for run in runs)


@functools.lru_cache(maxsize=256)
def _has_odd_origin(runs: tuple[Run, ...]) -> bool:
    """Whether the statistics of a sequence start elsewhere than at a multiple of four numbers."""
    return any(run.origin % 4 for run in runs)


def _copies(x: torch.Tensor, spread: int) -> torch.Tensor:
    """Four copies of x, `spread` numbers apart, copy j with j numbers before it: one of them is aligned wherever a
    sequence starts."""
    copies = x.new_zeros(4, spread)
    for late in range(4):
        copies[late, late : late + x.numel()] = x.flatten()
    return copies


def _readable(x: torch.Tensor) -> bool:
    """Whether TMA takes the rows of x [s, b, h, d]: everything that it starts from is a multiple of 16 bytes."""
    rows, batch, heads = x.stride()[:3]
    return (
        x.stride(3) == 1 and not (rows % 8 or batch % 8 or heads % 8 or x.data_ptr() % 16) and x.numel() > 0
    )


def _columns(x: torch.Tensor) -> int:
    _, batch, heads, d = x.shape
    return (batch - 1) * x.stride(1) + (heads - 1) * x.stride(2) + d


def _rows_apart(x: torch.Tensor) -> torch.Tensor:
    """x with all heads of a row inside one row stride, as a two-dimensional view needs them: bshd of several sequences
    is copied."""
    return x if _columns(x) <= x.stride(0) else x.contiguous()


def _descriptor(x: torch.Tensor, rows: int) -> Descriptor:
    """x [s, b, h, d] as rows of numbers; a tile is `rows` of them and d columns, from b * stride(1) + h * stride(2)."""
    block = [rows, x.shape[-1]]
    return Descriptor(
        x, [x.shape[0], _columns(x)], [x.stride(0), 1], block, _tile_layout(rows, x.shape[-1], x.dtype)
    )


@functools.cache
def _tile_layout(rows: int, d: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, d], _ELEMENT[dtype])


_LINE_LAYOUT = gl.NVMMASharedLayout(0, 32, rank=1)


def _line(x: torch.Tensor, size: int) -> Descriptor:
    return Descriptor(x, [x.numel()], [1], [size], _LINE_LAYOUT)
