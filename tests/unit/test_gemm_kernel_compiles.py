"""Every launch entry compiles for gfx942 and gfx950 without a GPU, in its numerics class, without spills."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_overrides.kernels.gemm import gated_kernel
from te_overrides.kernels.gemm.kernel import constexprs, gemm_kernel, lane_tree
from te_overrides.kernels.gemm.launch_table import (
    GFX942,
    GFX950,
    ROWS,
    TABLE,
    Launch,
    NoLaunchError,
    launch_for,
)
from te_overrides.kernels.gemm.reference import LaneError
from te_overrides.kernels.launching import entry_options

AMD = [
    (arch, op, entry)
    for (arch, op), entries in TABLE.items()
    if arch in (GFX942, GFX950)
    for entry in entries
]
INSTRUCTION = {GFX942: "v_mfma_f32_16x16x16_bf16", GFX950: "v_mfma_f32_16x16x32_bf16"}


def compile_entry(arch: str, operation: str, entry: Launch) -> triton.compiler.CompiledKernel:
    if operation == "gated":
        function, options = gated_kernel.gated_kernel, gated_kernel.options(entry, hip=True)
        values = gated_kernel.constants(entry, torch.bfloat16, keep=True, hip=True)
    else:
        function, options = gemm_kernel, entry_options(entry, hip=True)
        count = 1 if operation == "one_lane" else 8
        lane = torch.float32 if operation == "one_lane" else torch.bfloat16
        values = constexprs(entry, count=count, segments=1, lane=lane, out=torch.bfloat16, hip=True)
    pointers = {name: "*bf16" for name in ("a", "b", "c", "packed") if name in function.arg_names}
    signature = dict.fromkeys(function.arg_names, "i32") | pointers | dict.fromkeys(values, "constexpr")
    # What Triton specializes on for a contiguous operand: unit strides, sizes and pointers that 16 divides.
    fixed = {"a_k": 1, "b_k": 1}
    signature |= dict.fromkeys(fixed, "constexpr")
    divisible = [i for i, name in enumerate(signature) if signature[name] not in ("constexpr",)]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={**values, **fixed},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)


@pytest.mark.parametrize(("arch", "operation", "entry"), AMD, ids=lambda x: str(x)[:40])
def test_an_amd_entry_has_one_instruction_and_no_spill(arch: str, operation: str, entry: Launch) -> None:
    assembly = compile_entry(arch, operation, entry).asm["amdgcn"]
    opcodes = set(re.findall(r"^\s*(v_mfma\w+)", assembly, re.M))
    assert opcodes == {INSTRUCTION[arch]}, f"{arch} {operation} {entry}: {opcodes}"
    spills = {
        name: int(n) for name, n in re.findall(r"\.(vgpr_spill_count|sgpr_spill_count):\s*(\d+)", assembly)
    }
    assert spills["vgpr_spill_count"] == 0, f"{arch} {operation} {entry}: {spills}"
    if operation == "gated":
        # The activation's float64 products and sums stay apart; a product is not merged into its conversion.
        assert not re.search(r"v_fma_mix(?:lo|hi)_f16", assembly)


def test_a_class_is_one_k_order_over_all_buckets() -> None:
    for arch in {arch for arch, _ in TABLE}:
        entries = [entry for (a, _), group in TABLE.items() if a == arch for entry in group]
        assert len({(entry.nonkdim, entry.kpack) for entry in entries}) == 1
        if arch != "sm_90":
            assert len({entry.block_k for entry in entries}) == 1
        assert all(len(group) == len(ROWS) for (a, _), group in TABLE.items() if a == arch)


def test_another_number_of_lanes_than_its_levels_hold_is_refused() -> None:
    """Lanes 0 to 7 of sixteen would be lost."""
    a, b = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(16, 512, dtype=torch.bfloat16)
    with pytest.raises(LaneError, match="16 lanes on one rank"):
        lane_tree(a, b, tp_size=1, lanes=16)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(NoLaunchError, match=r"sm_80.*gfx942.*certify"):
        launch_for("sm_80", "one_lane", 1)
