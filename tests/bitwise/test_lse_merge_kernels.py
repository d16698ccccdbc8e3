"""The Triton kernels: equal to the references in the interpreter, and as written in the code compiled for AMD GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from te_overrides.kernels.lse_merge import ops, reference
from upstream_wheels import ROOT

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
kernel = pytest.importorskip("te_overrides.kernels.lse_merge.kernel")
lse_kernel = pytest.importorskip("te_overrides.kernels.lse_merge.lse_kernel")
out_kernel = pytest.importorskip("te_overrides.kernels.lse_merge.out_kernel")


def test_every_kernel_equals_its_reference_in_the_interpreter() -> None:
    """All functions of portable math, all forms of the merge; every dtype, both formats, strided and packed."""
    script = ROOT / "tests" / "triton_cpu" / "merge_in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["math"].pop("mutant")[0] > 0, "a library function in float32 went unnoticed"
    assert len(counts["math"]) == 9 and len(counts["merge"]) > 80
    for group in counts.values():
        for name, (mismatched, total) in group.items():
            assert mismatched == 0, f"{name}: {mismatched} of {total} elements differ"


def _compiled(
    arch: str, function: Any, constants: dict[str, Any], pointers: dict[str, str], threads: int
) -> str:
    """Assembly of a kernel as it is launched for contiguous operands with 128 columns."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {name: 1 for name in function.arg_names if name in UNIT_STRIDES}
    signature = {
        name: "constexpr"
        if name in constants
        else f"*{pointers[name]}"
        if name in pointers
        else "i64"
        if "stride" in name
        else "i32"
        for name in function.arg_names
    }
    # What a launch finds out about its arguments: pointers and strides are multiples of 16.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned
        for index, name in enumerate(function.arg_names)
        if name in pointers or ("stride" in name and name not in constants)
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": threads // 64, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options=options).asm["amdgcn"]


UNIT_STRIDES = (
    "lse_stride_2",
    "old_stride_2",
    "new_stride_2",
    "step_stride_2",
    "out_stride_3",
    "step_out_stride_3",
)


def _merge_alone(arch: str, lse: str = "fp32") -> str:
    pointers = {"lse_ptr": lse, "step_ptr": "fp32"}
    return _compiled(
        arch, lse_kernel.merge_kernel, {"BLOCK": kernel.MERGE_BLOCK}, pointers, kernel.MERGE_THREADS
    )


def _weights(arch: str, form: int) -> str:
    pointers = dict.fromkeys(("old_ptr", "new_ptr", "step_ptr", "weight_ptr"), "fp32")
    constants = {"FORM": form, "BLOCK": kernel.WEIGHTS_BLOCK}
    return _compiled(arch, lse_kernel.weights_kernel, constants, pointers, kernel.WEIGHTS_THREADS)


def _outputs(arch: str, form: int) -> str:
    pointers = {"out_ptr": "bf16", "step_out_ptr": "bf16", "weight_ptr": "fp32"}
    constants = {
        "FORM": form, "BLOCK_ROWS": kernel.OUT_ROWS, "BLOCK_COLUMNS": kernel.OUT_COLUMNS, "WHOLE": True,
    }  # fmt: skip
    return _compiled(arch, out_kernel.correct_kernel, constants, pointers, kernel.OUT_THREADS)


def _require_nothing_spilled_or_contracted(assembly: str) -> int:
    """Number of float64 divisions; their refinement steps are the only fused operations, five in each."""
    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None and int(found.group(1)) == 0, name
    assert not re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad)\w*_f32", assembly), (
        "float32 multiply-adds are contracted"
    )
    divisions = len(re.findall(r"\bv_div_fmas_f64", assembly))
    assert len(re.findall(r"\bv_fmac?_f64", assembly)) == 5 * divisions
    return divisions


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_compiled_for_amd_nothing_spills_is_contracted_or_computed_twice(arch: str) -> None:
    for lse in ("fp32", "fp64"):
        divisions = _require_nothing_spilled_or_contracted(_merge_alone(arch, lse))
        assert divisions == kernel.MERGE_BLOCK // kernel.MERGE_THREADS, "a merge is computed more than once"
    for form in range(4):
        assembly = _weights(arch, form)
        divisions = _require_nothing_spilled_or_contracted(assembly)
        per_thread = kernel.WEIGHTS_BLOCK // kernel.WEIGHTS_THREADS
        assert divisions == (per_thread if form == kernel.MERGE else 0), "a merge is computed more than once"
        # Clamped from above once: how often a thread computes an exp. The merge's own exp has no such clamp.
        exponentials = len(re.findall(r"\bv_cmp_nlt_f64", assembly)) // per_thread
        weights = 2 if form in (kernel.RESCALE, kernel.MERGE) else 1
        assert exponentials == weights, "a weight is computed more than once"
        outputs = _outputs(arch, form)
        assert _require_nothing_spilled_or_contracted(outputs) == 0
        assert not re.findall(r"_f64\b", outputs), "the pass over the outputs computes in float64"


def _operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(2, 4, 6, generator=generator) * 3 for _ in range(2))
    out, step_out = (torch.randn(2, 6, 4, 8, generator=generator).bfloat16() for _ in range(2))
    return out, lse, step_out, step


def test_the_operators_are_opaque_to_an_outer_compile_and_keep_the_bits() -> None:
    """ROCm/TransformerEngine#693: a compiler around the caller must not choose a variant of the merge."""

    def step_of_a_ring(
        out: torch.Tensor, lse: torch.Tensor, step_out: torch.Tensor, step: torch.Tensor
    ) -> Any:
        old = lse.clone()
        ops.merge_lse_(lse, step)
        ops.incremental_out_correction_(out, step_out, old, lse, step, 1)
        return ops.out_correction_init(step_out, lse, step, 1)

    want = _operands()
    init = step_of_a_ring(*want)
    for backend in ("aot_eager", "inductor"):
        got = _operands()
        compiled_init = torch.compile(step_of_a_ring, fullgraph=True, backend=backend)(*got)
        for name, a, b in zip(("out", "lse"), got, want, strict=False):
            assert_equal_bits(a, b, f"{name} under {backend}")
        assert_equal_bits(compiled_init, init, f"init under {backend}")


def test_the_operators_schemas_tell_the_truth() -> None:
    out, lse, step_out, step = _operands()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.merge_lse_, (lse, step), test_utils=checks)
    torch.library.opcheck(
        ops.merge_second_half_lse_, (lse.view(2, 4, 2, 3), step[..., 3:]), test_utils=checks
    )
    torch.library.opcheck(ops.out_correction_init, (step_out, lse, step, 1), test_utils=checks)
    torch.library.opcheck(ops.merge_, (out, lse, step_out, step, 1), test_utils=checks)


def test_every_function_of_the_reference_is_an_operator() -> None:
    public = {name for name in ops.SCHEMAS if callable(getattr(reference, name))}
    assert public == set(ops.SCHEMAS) and all(hasattr(ops, name) for name in public)
