"""The norm's Triton kernels: equal to the references in the interpreter; no spill in the code of any GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from upstream_wheels import ROOT

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
kernel = pytest.importorskip("te_overrides.kernels.rmsnorm.kernel")

COLUMNS = (64, 128, 1000, 2048, 4096, 5120, 8192, 16384, 32768)


@pytest.mark.slow
def test_every_kernel_equals_its_reference_in_the_interpreter() -> None:
    """Norm, add and norm, gradients, granules: every dtype, odd widths, strided rows, special values, empty."""
    script = ROOT / "tests" / "triton_cpu" / "norms_in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    mutants = {name: counts["trees"].pop(name) for name in list(counts["trees"]) if "mutant" in name}
    assert mutants.pop("mutant 0")[0] == 0, "a single column has no order"
    assert all(mismatched > 0 for mismatched, _ in mutants.values()), "a butterfly went unnoticed"
    assert len(counts["forwards"]) > 40 and len(counts["backwards"]) == 2 * 6 + 4
    for group in counts.values():
        for name, (mismatched, total) in group.items():
            assert mismatched == 0, f"{name}: {mismatched} of {total} elements differ"


def _compiled(
    target: Any, function: Any, constants: dict[str, Any], threads: int, element: str = "bf16"
) -> Any:
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr"
        if name in constants
        else "*fp32"
        if name in ("rstd_ptr", "partial_ptr")
        else f"*{element}"
        if name.endswith("_ptr")
        else "i64"
        if name == "epsilon_bits"
        else "i32"
        for name in function.arg_names
    }
    # What a launch finds out about its arguments: pointers and strides are multiples of 16.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name.endswith("_ptr") or ("stride" in name and constants["COLUMNS"] % 16 == 0)
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": threads // target.warp_size, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def _spills_on_nvidia(ptx: str, folder: Path) -> int:
    """Bytes of spill stores that ptxas reports."""
    import triton.backends.nvidia as backend

    (folder / "kernel.ptx").write_text(ptx)
    tool = next((Path(backend.__file__).parent / "bin").glob("ptxas*"))
    command = [
        str(tool),
        "-v",
        "--gpu-name=sm_90a",
        str(folder / "kernel.ptx"),
        "-o",
        str(folder / "kernel.cubin"),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", report)[1])  # type: ignore[index]


def _cases(hip: bool) -> list[tuple[Any, dict[str, Any], int]]:
    found = []
    for columns in COLUMNS:
        common = {
            "COLUMNS": columns,
            "LEVELS": (columns - 1).bit_length(),
            "ADD": True,
            "ZERO_CENTERED": True,
        }
        rows, threads = kernel.forward_launch(columns, hip)
        found.append((kernel.forward_kernel, common | {"ROWS": rows}, threads))
        forms = {"ADD": True, "ZERO_CENTERED": True}
        if columns <= kernel.MOST_SUMMED_COLUMNS:
            chains, threads = kernel.backward_launch(columns, hip)
            heads = 4 if columns <= 256 else 1
            constants = common | {"CHAINS": chains, "HEADS": heads, "GRANULE": 16}
            found.append((kernel.backward_kernel, constants, threads))
            continue
        more = common["LEVELS"] - kernel.PIECE_LEVELS
        constants = {"COLUMNS": columns, "PIECE_LEVELS": kernel.PIECE_LEVELS, "MORE_LEVELS": more} | forms
        found.append((kernel.long_rows_kernel, constants, kernel.PIECE_THREADS))
        constants = {"COLUMNS": columns, "BLOCK": kernel.PARTIAL_COLUMNS, "GRANULE": 16}
        found.append((kernel.partials_kernel, constants, kernel.PARTIAL_THREADS))
    return found


COMPILED = [(arch, case) for arch in ("gfx942", "gfx950", "sm_90") for case in _cases(arch != "sm_90")]


@pytest.mark.parametrize(
    ("arch", "case"),
    COMPILED,
    ids=[f"{arch}-{case[0].__name__.split('_')[0]}-{case[1]['COLUMNS']}" for arch, case in COMPILED],
)
def test_compiled_nothing_spills_or_is_contracted(arch: str, case: tuple[Any, ...], tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget

    function, constants, threads = case
    constants = constants | {"NATIVE": arch == "sm_90"}
    if arch == "sm_90":
        ptx = _compiled(GPUTarget("cuda", 90, 32), function, constants, threads).asm["ptx"]
        # Arithmetic of 16 bits says that it rounds: only without that might it be contracted.
        assert not re.findall(r"(?:add|mul|sub)\.(?:bf16|f16)", ptx)
        assert not re.findall(r"fma\.\w+\.f(?:32|64)", ptx), "multiply-adds are contracted"
        assert _spills_on_nvidia(ptx, tmp_path) == 0
        return
    assembly = _compiled(GPUTarget("hip", arch, 64), function, constants, threads).asm["amdgcn"]
    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None and int(found.group(1)) == 0, name
    # The refinement of a division, five steps, is the only place for fused operations.
    divisions = len(re.findall(r"\bv_div_fmas_f32", assembly))
    fused = re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad)\w*_f(?:32|16)", assembly)
    assert len(fused) == 5 * divisions, "multiply-adds are contracted"
