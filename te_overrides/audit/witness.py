"""Numbers to a symbolic split: one launch of each group executed on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from te_overrides.audit.api import AuditResult, Group, execute
from te_overrides.audit.compile import Kernel, Launch
from te_overrides.audit.memory import Unmodelled
from te_overrides.audit.samples import Difference, Errors, count_differences, count_errors

__all__ = ["Witness", "witnesses"]


@dataclass(frozen=True)
class Witness:
    """Of one group: the launch executed, its distance from group 0 and from the reference (if there is one).

    `refused` says why a group could not be executed; then the other figures are None.
    """

    launch: Launch
    against_first: Difference | None
    errors: Errors | None
    refused: str = ""


def representative(group: Group, kernel: Kernel, elements: int) -> Launch:
    """The launch that wastes least: the most elements of a program per wave, of those that divide `elements`."""

    def rank(launch: Launch) -> tuple[bool, bool, int]:
        block = int(launch.constexpr(kernel.block))
        return elements % block != 0, block < 64 * launch.num_warps, abs(block - 64 * launch.num_warps)

    return min(group.launches, key=rank)


def witnesses(
    kernel: Kernel,
    arch: str,
    result: AuditResult,
    arrays: Mapping[str, NDArray],
    elements: int,
    reference: Callable[[Mapping[str, NDArray]], NDArray[np.float64] | None] | None = None,
) -> list[Witness]:
    """Execute one launch of every group.

    Args:
        arrays: contents of every pointer argument (`samples.uniform_inputs`).
        reference: from those to the exact output, for the one buffer the kernel changes.
    """
    found: list[Witness] = []
    first: dict[str, NDArray] | None = None
    for group in result.groups:
        launch = representative(group, kernel, elements)
        try:
            got = execute(kernel, arch, launch, arrays, elements)
        except Unmodelled as reason:
            found.append(Witness(launch, None, None, str(reason)))
            continue
        first = got if first is None else first
        names = [name for name in got if not np.array_equal(got[name], arrays[name], equal_nan=False)]
        parts = [count_differences(first[name], got[name]) for name in kernel.pointers if name in names]
        total = Difference(
            sum(part.differing for part in parts),
            sum(part.total for part in parts),
            max((part.max_abs for part in parts), default=0.0),
        )
        want = reference(arrays) if reference is not None else None
        errors = count_errors(got[names[-1]], want) if want is not None and names else None
        found.append(Witness(launch, total, errors))
    return found
