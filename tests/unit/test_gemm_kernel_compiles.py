"""Every launch entry compiles for sm_90, gfx942 and gfx950 without a GPU, in its numerics class, without spills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from amd_code import gemm_instruction, matrix_instructions, spilled
from hopper_code import stack
from te_overrides.kernels.gemm import gated_kernel
from te_overrides.kernels.gemm.kernel import constexprs, gemm_kernel, lane_tree
from te_overrides.kernels.gemm.launch_table import (
    CUDA,
    ROWS,
    TABLE,
    Launch,
    NoLaunchError,
    launch_for,
)
from te_overrides.kernels.gemm.reference import LaneError
from te_overrides.kernels.launching import entry_options

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POINTER = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
FORWARD, INPUT, WEIGHT = ("a_k", "b_k"), ("a_k", "b_n"), ("a_m", "b_n")
"""Which stride is 1 in a forward product, in an input's gradient and in a weight's."""


class Built(NamedTuple):
    """What is compiled: an entry's kernel for one dtype and layout."""

    arch: str
    operation: str
    entry: Launch
    dtype: torch.dtype
    layout: tuple[str, str] = FORWARD
    count: int = 1
    segments: int = 1
    out: torch.dtype | None = None

    def __str__(self) -> str:
        tile = f"{self.entry.block_m}x{self.entry.block_n}"
        how = f"{self.count} lanes-{self.segments} segments" if self.operation == "lane_tree" else ""
        return f"{self.arch}-{self.operation}-{tile}-{self.dtype}-{'-'.join(self.layout)}-{how}"


def _cases() -> Iterator[Built]:
    """For Hopper every entry in both dtypes; the largest tile, which needs most registers, as the modules call it.

    AMD's entries are compiled where their class is certified (test_audit_gemm_table); here is what lacks there.
    """
    for (arch, operation), entries in TABLE.items():
        for entry in entries[-1:] if arch != CUDA else entries:
            largest = entry is entries[-1]
            for dtype in (BF16, FP16):
                case = Built(arch, operation, entry, dtype)
                if operation == "gated":
                    if arch == CUDA:
                        yield case
                elif operation == "lane_tree":
                    yield case._replace(layout=INPUT, count=8, segments=2)
                    if largest:
                        yield case._replace(count=8 if arch != CUDA or dtype is FP16 else 2)
                else:
                    if arch == CUDA:
                        yield case if dtype is BF16 else case._replace(layout=INPUT)
                    if largest:
                        yield case._replace(layout=WEIGHT, out=FP32)


def compiled(case: Built) -> triton.compiler.CompiledKernel:
    hip = case.arch != CUDA
    if case.operation == "gated":
        function, options = gated_kernel.gated_kernel, gated_kernel.options(case.entry, hip=hip)
        values = gated_kernel.constants(case.entry, case.dtype, keep=True, hip=hip)
    else:
        function, options = gemm_kernel, entry_options(case.entry, hip=hip)
        lane = FP32 if case.operation == "one_lane" else case.dtype
        out = case.out or case.dtype
        values = constexprs(case.entry, count=case.count, segments=case.segments, lane=lane, out=out, hip=hip)
    pointers = {name: POINTER[case.dtype] for name in ("a", "b", "c", "packed") if name in function.arg_names}
    pointers["c"] = POINTER[case.out or case.dtype]
    signature = dict.fromkeys(function.arg_names, "i32") | pointers | dict.fromkeys(values, "constexpr")
    # What Triton specializes on: unit strides, sizes and pointers that 16 divides.
    fixed = dict.fromkeys(case.layout, 1)
    signature |= dict.fromkeys(fixed, "constexpr")
    divisible = [i for i, name in enumerate(signature) if signature[name] not in ("constexpr",)]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={**values, **fixed},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    target = GPUTarget("hip", case.arch, 64) if hip else GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_an_entry_has_one_instruction_and_no_spill(case: Built) -> None:
    kernel = compiled(case)
    if case.arch == CUDA:
        # What the gated kernel may keep aside is one value, from before its main loop to behind it.
        limit = 8 if case.operation == "gated" else 0
        assert stack(kernel) <= limit, f"{case}: {stack(kernel)} bytes of stack a thread"
        return
    assembly = kernel.asm["amdgcn"]
    want = gemm_instruction(case.arch, "bf16" if case.dtype is BF16 else "f16")
    assert matrix_instructions(assembly) == {want}, f"{case}: {matrix_instructions(assembly)}"
    assert not spilled(assembly), f"{case}: {spilled(assembly)}"


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
