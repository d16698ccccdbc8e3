"""Audit a kernel over launch configurations: which of them compute the same.

`audit` compiles every launch, runs each symbolically over the same output elements and sorts the launches into
groups of equal expressions. A group is a proof: within it every output element has the same bits whatever the
input. Two groups are two expressions; `numeric` says on how many of some inputs they differ. A launch with
anything not modelled is in no group but in `unknown`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit.compile import Kernel, Launch, compile_kernel
from te_overrides.audit.decode import Program, decode
from te_overrides.audit.launch import run_programs, storing_lanes
from te_overrides.audit.memory import NumericBuffer, SymbolicBuffer, Unmodelled

__all__ = ["AuditResult", "Group", "audit", "execute", "expressions", "load_program"]

_ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2,
             "i32": 4, "u32": 4, "i64": 8, "u64": 8}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Launches that compute the same expressions; `elements_apart` counts those that differ from group 0."""

    digest: str
    launches: tuple[Launch, ...]
    elements_apart: int


@dataclass(frozen=True)
class AuditResult:
    """Groups of equal launches, most launches first, and why others could not be judged."""

    kernel: str
    arch: str
    elements: int
    groups: tuple[Group, ...]
    unknown: Mapping[Launch, str] = field(default_factory=dict)

    @property
    def one_class(self) -> bool:
        """True only if every launch was understood and all of them are one group."""
        return len(self.groups) == 1 and not self.unknown

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "elements": self.elements,
            "one_class": self.one_class,
            "groups": [
                {
                    "digest": group.digest,
                    "elements_apart": group.elements_apart,
                    "launches": [dict((*launch.constexprs, *launch.options)) for launch in group.launches],
                }
                for group in self.groups
            ],
            "unknown": [
                {"launch": dict((*launch.constexprs, *launch.options)), "reason": reason}
                for launch, reason in self.unknown.items()
            ],
        }


def _scalars(kernel: Kernel, launch: Launch, elements: int) -> dict[str, int | float]:
    values = {
        name: value(launch, elements) if callable(value) else value for name, value in kernel.scalars.items()
    }
    for name, kind in kernel.signature.items():
        if not kind.startswith("*") and name not in values:
            if kind not in ("i32", "i64"):
                raise ValueError(f"{kernel.name}: give a value for the scalar parameter {name} ({kind})")
            values[name] = elements
    return values


def load_program(kernel: Kernel, arch: str, launch: Launch, elements: int) -> Program:
    """Compile (or find in the cache) and decode one launch."""
    scalars = _scalars(kernel, launch, elements)
    divisible = tuple(
        name for name, value in scalars.items() if isinstance(value, int) and value % 16 == 0 and value
    )
    return decode(compile_kernel(kernel, arch, launch, divisible).assembly)


def _runtime(kernel: Kernel, launch: Launch) -> tuple[list[str], list[str]]:
    fixed = set(kernel.constexprs) | {name for name, _ in launch.constexprs}
    names = [name for name in kernel.fn.arg_names if name not in fixed]
    return names, [kernel.signature[name] for name in names]


def _run(
    kernel: Kernel,
    launch: Launch,
    program: Program,
    elements: int,
    make_buffers: Any,
    seed_ulps: int = 0,
) -> dict[str, Any]:
    names, types = _runtime(kernel, launch)
    scalars = _scalars(kernel, launch, elements)
    block = int(launch.constexpr(kernel.block))
    programs = range(kernel.programs(launch, elements) if kernel.programs else -(-elements // block))
    kept = None
    if block < program.wave_size * launch.num_warps:
        probe = run_programs(
            program, names, types, scalars, _symbolic(kernel, elements), programs[:1], launch.num_warps
        )
        kept = storing_lanes(probe, launch.num_warps)
    buffers = make_buffers()
    run_programs(program, names, types, scalars, buffers, programs, launch.num_warps, kept, seed_ulps)
    return buffers


def _symbolic(kernel: Kernel, elements: int) -> dict[str, SymbolicBuffer]:
    return {
        name: SymbolicBuffer(
            name, elements * kernel.sizes.get(name, 1), _ITEMSIZE[kernel.signature[name].lstrip("*")]
        )
        for name in kernel.pointers
    }


def execute(
    kernel: Kernel,
    arch: str,
    launch: Launch,
    arrays: Mapping[str, NDArray],
    elements: int,
    seed_ulps: int = 0,
    assembly: str | None = None,
) -> dict[str, NDArray]:
    """Run one launch on numbers.

    Args:
        arrays: contents of every pointer argument; bfloat16 as uint16 bit patterns.
        elements: output elements, which set the number of programs.
        seed_ulps: move the result of every approximate instruction by so many units in the last place.
        assembly: what was compiled elsewhere for this launch, instead of compiling it here.

    Returns:
        the buffers after the launch.

    Raises:
        Unmodelled: the code is not understood.
    """
    program = decode(assembly) if assembly else load_program(kernel, arch, launch, elements)

    def numbers() -> dict[str, NumericBuffer]:
        return {name: NumericBuffer(name, arrays[name]) for name in kernel.pointers}

    buffers = _run(kernel, launch, program, elements, numbers, seed_ulps)
    return {name: buffer.array() for name, buffer in buffers.items()}


def expressions(
    kernel: Kernel, arch: str, launch: Launch, elements: int, assembly: str | None = None
) -> NDArray[np.uint64]:
    """Hashes [2, outputs] of everything the launch stores, two words for each element of each written buffer.

    Raises:
        Unmodelled: the code is not understood, or an output rests on something that is not.
    """
    program = decode(assembly) if assembly else load_program(kernel, arch, launch, elements)
    buffers = _run(kernel, launch, program, elements, lambda: _symbolic(kernel, elements))
    stored = []
    for buffer in buffers.values():
        if (buffer.bad & buffer.written).any():
            raise Unmodelled(f"{buffer.name}: " + "; ".join(sorted(buffer.why)))
        # Elements nobody wrote keep the hash of their input value, so that leaving one out is a difference.
        if buffer.written.any():
            stored.append(buffer.h)
    if not stored:
        raise Unmodelled("the launch stores nothing")
    return np.concatenate(stored, axis=1)


def audit(
    kernel: Kernel, arch: str, launches: Sequence[Launch], elements: int, progress: Any = None
) -> AuditResult:
    """Sort launches by what they compute.

    Args:
        kernel, arch, launches: what is compiled; arch is one of `compile.ARCHITECTURES`.
        elements: output elements of each launch; kernels without a mask need a multiple of every block.
        progress: called with each launch before it is looked at.
    """
    found: dict[str, tuple[list[Launch], NDArray[np.uint64]]] = {}
    unknown: dict[Launch, str] = {}
    for launch in launches:
        if progress is not None:
            progress(launch)
        try:
            hashes = expressions(kernel, arch, launch, elements)
        except Unmodelled as reason:
            unknown[launch] = str(reason)
            continue
        digest = hashlib.blake2b(hashes.tobytes(), digest_size=16).hexdigest()
        found.setdefault(digest, ([], hashes))[0].append(launch)
    ordered = sorted(found.items(), key=lambda item: -len(item[1][0]))
    groups = tuple(
        Group(digest, tuple(members), _apart(ordered[0][1][1], hashes))
        for digest, (members, hashes) in ordered
    )
    return AuditResult(kernel.name, arch, elements, groups, unknown)


def _apart(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> int:
    if left.shape != right.shape:
        return max(left.shape[1], right.shape[1])
    return int((left != right).any(axis=0).sum())
