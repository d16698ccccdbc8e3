"""Set up the machine as a launch would: kernel arguments, buffers, workgroup and work-item numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit import exchange, matrix, scalar, transfer, vector  # noqa: F401  (they register their instructions)
from te_overrides.audit.decode import Program
from te_overrides.audit.machine import Machine
from te_overrides.audit.memory import NumericBuffer, SymbolicBuffer, Unmodelled, address_of

__all__ = ["Buffers", "run_programs", "storing_lanes"]

Buffers = Mapping[str, NumericBuffer | SymbolicBuffer]

_USER_SGPRS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip
# Instructions through which a lane sees another one, beyond the first: every lane must be kept.
_CROSS_LANE = ("ds_", "v_readlane", "v_permlane", "v_mov_b32_dpp", "v_mfma", "v_wmma")
_MODES = {"float_round_mode_32": 0, "float_round_mode_16_64": 0, "float_denorm_mode_32": 3,
          "float_denorm_mode_16_64": 3, "dx10_clamp": 1, "ieee_mode": 1}  # fmt: skip


def _kernarg(program: Program, values: Sequence[int | float], types: Sequence[str]) -> NDArray[np.uint8]:
    size = program.directives.get("kernarg_size", 0)
    segment = np.zeros(max(size, 64) + 64, np.uint8)
    if len(values) > len(program.arguments):
        raise Unmodelled(f"{len(values)} arguments for a kernel that takes {len(program.arguments)}")
    dtypes = {"fp32": np.float32, "fp64": np.float64, "i64": np.int64, "u64": np.uint64}
    for argument, value, kind in zip(program.arguments, values, types, strict=False):
        dtype = np.uint64 if kind.startswith("*") else dtypes.get(kind, np.int32)
        raw = np.array([value], dtype).view(np.uint8)
        if raw.size < argument.size:
            raise Unmodelled(f"a {kind} argument of {argument.size} bytes")
        segment[argument.offset : argument.offset + argument.size] = raw[: argument.size]
    return segment


def _check_modes(program: Program) -> None:
    for name, expected in _MODES.items():
        found = program.directives.get(name, expected)
        if found != expected:
            raise Unmodelled(f"float mode {name}={found} (the tables are for {expected})")


def crosses_lanes(program: Program) -> bool:
    return any(
        instruction.opcode.startswith(_CROSS_LANE) or "dpp" in instruction.encoding
        for instruction in program.instructions
    )


def run_programs(
    program: Program,
    names: Sequence[str],
    types: Sequence[str],
    scalars: Mapping[str, int | float],
    buffers: Buffers,
    programs: Sequence[int],
    num_warps: int,
    kept: tuple[Sequence[int], int] | None = None,
    seed_ulps: int = 0,
) -> Machine:
    """Run the workgroups `programs` of a one-dimensional launch; the buffers hold the result.

    Args:
        names, types: runtime parameters in order, with their Triton types.
        scalars: values of those that are not pointers.
        kept: waves of each workgroup, and number of lanes of each, that are run; None for all.

    Raises:
        Unmodelled: the code is not understood.
    """
    _check_modes(program)
    index_of = {name: index + 1 for index, name in enumerate(buffers)}
    values = [address_of(index_of[name]) if name in buffers else scalars[name] for name in names]
    segment = NumericBuffer("kernel arguments", _kernarg(program, values, types))
    waves, lanes = kept or (range(num_warps), program.wave_size)
    table = {0: segment} | {index_of[name]: buffer for name, buffer in buffers.items()}
    machine = Machine(program, table, len(programs) * len(waves), lanes, seed_ulps)  # type: ignore[arg-type]
    machine.group = np.repeat(np.arange(len(programs)), len(waves))[:, None]
    scalars_at = machine.registers["s"]
    at = 0
    for name, count in _USER_SGPRS:
        if program.directives.get(f"user_sgpr_{name}"):
            if name == "kernarg_segment_ptr":
                base = address_of(0)
                scalars_at[at] = np.full((1, 1), base & 0xFFFFFFFF, np.uint32)
                scalars_at[at + 1] = np.full((1, 1), base >> 32, np.uint32)
            at += count
    workgroup = np.repeat(np.asarray(programs, np.uint32), len(waves))[:, None]
    at = program.directives.get("user_sgpr_count", at)
    for axis in "xyz":
        if program.directives.get(f"system_sgpr_workgroup_id_{axis}"):
            scalars_at[at] = workgroup if axis == "x" else np.zeros((1, 1), np.uint32)
            at += 1
    item = np.tile(np.asarray(waves, np.uint32) * np.uint32(program.wave_size), len(programs))[:, None]
    machine.registers["v"][0] = item + np.arange(lanes, dtype=np.uint32)[None]
    machine.run()
    return machine


def storing_lanes(machine: Machine, num_warps: int) -> tuple[list[int], int] | None:
    """From a run of one workgroup: its waves that store anything and how many lanes of them it takes."""
    if crosses_lanes(machine.program):
        return None
    storing = machine.storing.reshape(num_warps, machine.lanes)
    waves = [int(wave) for wave in np.flatnonzero(storing.any(axis=1))]
    if not waves:
        return None
    return waves, int(np.flatnonzero(storing.any(axis=0)).max()) + 1
