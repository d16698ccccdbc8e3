"""What a kernel compiled for an AMD GPU says of itself."""

from __future__ import annotations

import re


def matrix_instructions(assembly: str) -> set[str]:
    """Opcodes of the matrix instructions in it."""
    return set(re.findall(r"^\s*(v_mfma\w+)", assembly, re.M))


def spilled(assembly: str) -> dict[str, int]:
    """Registers that are kept in memory, and bytes of it that a work item has; those that are not 0."""
    names = "vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
    found = re.findall(rf"\.({names}):\s*(\d+)", assembly)
    assert len(found) == 3, f"not the assembly of one kernel: {found}"
    return {name: int(n) for name, n in found if int(n)}


def gemm_instruction(arch: str, dtype: str) -> str:
    """The GEMM's one matrix instruction for operands `dtype` ("bf16", "f16")."""
    return {"gfx942": "v_mfma_f32_16x16x16_", "gfx950": "v_mfma_f32_16x16x32_"}[arch] + dtype
