"""The merge's kernels as compiled for AMD GPUs compute one expression an element, whatever the launch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bits import assert_equal_bits

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from te_overrides.audit.api import AuditResult, audit, execute
from te_overrides.audit.compile import Kernel, launch_grid
from te_overrides.kernels.lse_merge import kernel, reference
from te_overrides.kernels.lse_merge.lse_kernel import merge_kernel, weights_kernel
from te_overrides.kernels.lse_merge.out_kernel import correct_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import lse_options

ARCHITECTURES = ["gfx942", "gfx950"]
COLUMNS = 128


def _strides(*names: str) -> dict[str, int]:
    return {f"{name}_stride_{i}": int(i == 2) for name in names for i in range(3)}


def _require_one_class(result: AuditResult) -> None:
    assert result.one_class, (len(result.groups), dict(result.unknown))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("accumulator", ["*fp32", "*fp64"])
def test_the_merge_is_one_expression(arch: str, accumulator: str) -> None:
    strides = _strides("lse", "step")
    merge = Kernel(
        merge_kernel,
        {"lse_ptr": accumulator, "step_ptr": "*fp32"}
        | dict.fromkeys((*strides, "size_1", "size_2", "blocks"), "i32"),
        block="BLOCK",
        scalars=strides | {"size_1": 1, "blocks": lambda launch, n: -(-n // int(launch.constexpr("BLOCK")))},
    )
    launches = launch_grid({"BLOCK": (64, 256, 1024), "num_warps": (1, 2, 4), "enable_fp_fusion": (False,)})
    _require_one_class(audit(merge, arch, launches, elements=1024))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("form", [kernel.SCALE, kernel.ADD, kernel.RESCALE, kernel.MERGE])
def test_the_weights_are_one_expression(arch: str, form: int) -> None:
    """No launch has fewer elements than threads: the launch table's own rule."""
    strides = _strides("old", "new", "step")
    weights = Kernel(
        weights_kernel,
        dict.fromkeys(("old_ptr", "new_ptr", "step_ptr", "weight_ptr"), "*fp32")
        | dict.fromkeys((*strides, "rows", "size_1", "size_2"), "i32"),
        constexprs={"FORM": form},
        block="BLOCK",
        scalars=strides | {"size_1": 1, "size_2": lambda _, n: n, "rows": lambda _, n: n},
        sizes={"weight_ptr": 2},
    )
    launches = launch_grid({"BLOCK": (256, 1024), "num_warps": (1, 2, 4), "enable_fp_fusion": (False,)})
    _require_one_class(audit(weights, arch, launches, elements=1024))
    assert kernel.WEIGHTS_BLOCK >= kernel.WEIGHTS_THREADS and kernel.MERGE_BLOCK >= kernel.MERGE_THREADS


def _correct(dtype: str, form: int) -> Kernel:
    """Outputs [2, rows / 2, 128], as many rows as the audit has elements."""
    scalars = {
        f"{name}_stride_{i}": value
        for name in ("out", "step_out")
        for i, value in enumerate((0, 2 * COLUMNS, COLUMNS, 1))
    } | {"weight_stride_0": 0, "weight_stride_1": 1, "weight_stride_2": lambda _, n: n // 2}
    return Kernel(
        correct_kernel,
        {"out_ptr": dtype, "step_out_ptr": dtype, "weight_ptr": "*fp32"}
        | dict.fromkeys((*scalars, "rows", "size_1", "size_2", "columns"), "i32"),
        constexprs={"FORM": form, "BLOCK_COLUMNS": COLUMNS, "WHOLE": True},
        block="BLOCK_ROWS",
        scalars=scalars
        | {"rows": lambda _, n: n, "size_1": lambda _, n: n // 2, "size_2": 2, "columns": COLUMNS},
        sizes={"out_ptr": COLUMNS, "step_out_ptr": COLUMNS, "weight_ptr": 2},
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("form", [kernel.SCALE, kernel.ADD, kernel.RESCALE])
def test_the_corrected_output_is_one_expression(arch: str, dtype: str, form: int) -> None:
    """MERGE corrects outputs as RESCALE does."""
    launches = launch_grid({"BLOCK_ROWS": (8, 32), "num_warps": (1, 4), "enable_fp_fusion": (False,)})
    _require_one_class(audit(_correct(dtype, form), arch, launches, elements=64))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_code_for_amd_gpus_has_the_reference_s_bits(arch: str, dtype: torch.dtype) -> None:
    """A whole fused merge executed from its machine code, rows without keys and special LSEs among them."""
    rows, heads = 256, 2
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(1, heads, rows // heads, generator=generator) * 4 for _ in range(2))
    special = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1e4, -49993.98, 1e-45, 89.0, -800.0])
    pairs = torch.cartesian_prod(special, special)
    lse.view(-1)[: len(pairs)], step.view(-1)[: len(pairs)] = pairs[:, 0], pairs[:, 1]
    out, step_out = (
        torch.randn(1, rows // heads, heads, COLUMNS, generator=generator).to(dtype) for _ in range(2)
    )
    want_out, want_lse = out.clone(), lse.clone()
    reference.merge_(want_out, want_lse, step_out, step, 1)

    def array(x: torch.Tensor) -> np.ndarray:
        return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1).copy()

    strides = _strides("old", "new", "step")
    weigh = Kernel(
        weights_kernel,
        dict.fromkeys(("old_ptr", "new_ptr", "step_ptr", "weight_ptr"), "*fp32")
        | dict.fromkeys((*strides, "rows", "size_1", "size_2"), "i32"),
        constexprs={"FORM": kernel.MERGE},
        block="BLOCK",
        scalars=strides | {"size_1": 1, "size_2": rows, "rows": rows},
        sizes={"weight_ptr": 2},
    )
    (launch,) = launch_grid({"BLOCK": (256,), "num_warps": (2,), "enable_fp_fusion": (False,)})
    arrays = {"old_ptr": array(lse), "new_ptr": array(lse), "step_ptr": array(step)}
    left = execute(weigh, arch, launch, arrays | {"weight_ptr": np.zeros(2 * rows, np.float32)}, rows)
    got_lse = torch.from_numpy(left["old_ptr"]).view_as(lse)
    assert_equal_bits(got_lse, want_lse, f"LSE on {arch}")
    (launch,) = launch_grid({"BLOCK_ROWS": (32,), "num_warps": (4,), "enable_fp_fusion": (False,)})
    name = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    arrays = {"out_ptr": array(out), "step_out_ptr": array(step_out), "weight_ptr": left["weight_ptr"]}
    right = execute(_correct(name, kernel.RESCALE), arch, launch, arrays, rows)["out_ptr"]
    got_out = torch.from_numpy(right).view(dtype).view_as(out)
    assert_equal_bits(got_out, want_out, f"output on {arch}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_formula_with_library_functions_is_not(arch: str) -> None:
    """ROCm/TransformerEngine#693: what the audit would have found before anybody had a device to find it on.

    Two groups with Triton 3.6.0, three with 3.9.0.
    """
    library = Kernel(lse_options.library_kernel(), {"lse_ptr": "*fp32", "step_ptr": "*fp32", "n": "i32"})
    launches = launch_grid({"XBLOCK": (32, 256, 1024), "num_warps": (1, 4, 8)})
    result = audit(library, arch, launches, elements=4096)
    assert not result.unknown and len(result.groups) > 1, [group.launches for group in result.groups]


def test_the_page_of_options_is_what_its_results_say() -> None:
    lse_options.page(check=True)
