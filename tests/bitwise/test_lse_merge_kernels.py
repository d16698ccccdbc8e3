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


def _compiled(arch: str, form: int | None, out: str = "bf16", lse: str = "fp32") -> str:
    """Assembly of the output kernel in one form, or of the merge alone (None), as it is launched for d = 128."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel._merge_kernel if form is None else kernel._out_kernel
    constants: dict[str, Any]
    if form is None:
        constants = {"BLOCK": kernel.MERGE_BLOCK, "lse_stride_2": 1, "step_stride_2": 1}
        pointers = {"lse_ptr": lse, "step_ptr": "fp32"}
        sizes, warps = ("size_1", "size_2", "blocks"), kernel.MERGE_THREADS // 64
    else:
        constants = {
            "FORM": form, "WIDE": lse == "fp64", "BLOCK_ROWS": kernel.OUT_ROWS, "BLOCK_COLUMNS": kernel.OUT_COLUMNS,
            "COLUMN_BLOCKS": 128 // kernel.OUT_COLUMNS, "WHOLE": True, "ASSEMBLY": "amdgcn",
            "out_stride_3": 1, "step_out_stride_3": 1,
        }  # fmt: skip
        pointers = {
            "out_ptr": out,
            "step_out_ptr": out,
            **dict.fromkeys(("old_ptr", "new_ptr"), lse),
            "step_ptr": "fp32",
        }
        sizes, warps = ("rows", "size_1", "size_2", "columns"), kernel.OUT_ROWS // 64
    signature = {
        name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i64"
        for name in function.arg_names
    }
    signature.update(dict.fromkeys(sizes, "i32"))
    # What a launch finds out about its arguments: pointers and strides are multiples of 16.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned
        for index, name in enumerate(function.arg_names)
        if name in pointers or ("stride" in name and name not in constants)
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options=options).asm["amdgcn"]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("form", [None, 0, 1, 2, 3])
def test_compiled_for_amd_nothing_spills_is_contracted_or_computed_twice(arch: str, form: int | None) -> None:
    assembly = _compiled(arch, form)

    def resource(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None, name
        return int(found.group(1))

    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert resource(name) == 0, f"{name} {resource(name)}"
    assert not re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad)\w*_f32", assembly), (
        "float32 multiply-adds are contracted"
    )
    divisions = len(re.findall(r"\bv_div_fmas_f64", assembly))
    # The division's own refinement steps are the only fused operations, and there are five of them in each.
    assert len(re.findall(r"\bv_fmac?_f64", assembly)) == 5 * divisions
    elements_per_thread = kernel.MERGE_BLOCK // kernel.MERGE_THREADS
    assert divisions == {None: elements_per_thread, 3: 1}.get(form, 0), "a merge is computed more than once"
    # Clamped from below once: how often a thread computes an exp.
    exponentials = len(re.findall(r"\bv_cmp_nlt_f64", assembly)) if form in (0, 1, 2) else None
    assert exponentials in (None, 2 if form == 2 else 1), "a weight is computed more than once"


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
