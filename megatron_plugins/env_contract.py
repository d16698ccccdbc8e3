"""Environment variables that change bits, what they must say, and why. Verified, never set.

Sources: ROCm/TransformerEngine (fused-attention and GEMM settings), rocBLAS and RCCL documentation, megatron-core's
``--deterministic-mode``. A variable that is unset is judged by what its reader does then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from patches.override import MODES as BOTH


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        name: its name.
        accepted: values that are fine.
        unset_ok: whether leaving it unset is fine.
        modes: in which modes it is required.
        reason: what it changes.
        condition: another variable that must be set (to anything but 0) for this one to matter, or None.
    """

    name: str
    accepted: tuple[str, ...]
    unset_ok: bool
    modes: tuple[str, ...]
    reason: str
    condition: str | None = None


VARIABLES: tuple[Variable, ...] = (
    Variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("0",), True, BOTH, "lets fused attention use atomics in dQ"),
    Variable(
        "NVTE_CK_IS_V3_ATOMIC_FP32", ("0",), False, BOTH,
        "CK's v3 backward adds dQ by atomics unless this is 0", "NVTE_CK_USES_BWD_V3",
    ),
    Variable(
        "NVTE_CK_HOW_V3_BF16_CVT", ("0",), True, BOTH, "rounding of CK's v3 kernels: 0 rounds to nearest even",
        "NVTE_CK_USES_BWD_V3",
    ),
    Variable("TE_HIPBLASLT_TUNING_RUN_COUNT", ("0",), True, BOTH, "picks a GEMM by timing it, per process"),
    Variable("TE_HIPBLASLT_TUNING_ALGO_COUNT", ("1",), True, BOTH, "size of the set that timing picks from"),
    Variable("ROCBLAS_DEFAULT_ATOMICS_MODE", ("0",), True, BOTH, "rocBLAS may split K with atomics"),
    Variable("RCCL_MSCCL_ENABLE", ("0",), True, BOTH, "MSCCL swaps the reduction algorithm by message size"),
    Variable(
        "DETERMINISTIC_ROCM_LIBRARY_GEMM", ("off", "certified"), True, ("invariant",),
        "whether a library product may serve where it was tested equal to ours; no other value means anything",
    ),
    Variable("TORCHINDUCTOR_MAX_AUTOTUNE", ("0",), True, BOTH, "picks compiled kernels by timing them"),
)  # fmt: skip

MISSPELLED = {"NVTE_CK_V3_ATOMIC_FP32": "NVTE_CK_IS_V3_ATOMIC_FP32"}
"""Names that circulate in published scripts although nobody reads them, and the name that is read."""


def violations(mode: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """What `environment` (default: this process's) breaks in `mode`, one sentence each, naming value and way out."""
    env = os.environ if environment is None else environment
    out = []
    for v in VARIABLES:
        if mode not in v.modes or (v.condition is not None and env.get(v.condition, "0") == "0"):
            continue
        found = env.get(v.name)
        if found in v.accepted or (found is None and v.unset_ok):
            continue
        out.append(
            f"{v.name}={'unset' if found is None else repr(found)}: {v.reason}; export {v.name}={v.accepted[0]}"
            + (" or unset it." if v.unset_ok else ".")
        )
    for wrong, right in MISSPELLED.items():
        if wrong in env:
            out.append(f"{wrong}={env[wrong]!r} is read by nobody; the variable is {right}.")
    return out
