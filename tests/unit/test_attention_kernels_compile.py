"""Every launch of the attention kernels compiles for its architecture without a GPU, in its class, without spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from te_overrides.audit.certificate import certificate_of  # noqa: E402
from te_overrides.audit.compile import Compiled  # noqa: E402
from te_overrides.kernels.attention import kernel_backward, kernel_forward  # noqa: E402
from te_overrides.kernels.attention.kernel import options  # noqa: E402
from te_overrides.kernels.attention.launch_table import (  # noqa: E402
    CUDA,
    GFX942,
    GFX950,
    TABLE,
    Launch,
    entries_for,
    padded,
)

TARGETS = {
    CUDA: GPUTarget("cuda", 90, 32),
    GFX942: GPUTarget("hip", GFX942, 64),
    GFX950: GPUTarget("hip", GFX950, 64),
}
INSTRUCTION = {GFX942: "v_mfma_f32_16x16x16_{}", GFX950: "v_mfma_f32_16x16x32_{}"}
# Registers on AMD: none. On Hopper accumulators fill the register file and assemblers differ by a few: Triton 3.6's
# spills nothing here, a newer one up to 128 bytes of a thread in the widest dK, dV.
SPILL_LIMIT = {CUDA: 128, GFX942: 0, GFX950: 0}
# Query and key, value.
DIMENSIONS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
ROWS = ("forward", "decode", "dq", "dkv")


def compiled(
    arch: str,
    which: str,
    entry: Launch,
    d: int,
    d_v: int,
    dtype: str = "bf16",
    *,
    paged: bool = False,
    tail: bool = True,
) -> Any:
    """One launch as the kernels' callers specialize it: four heads a group, aligned strides."""
    values: dict[str, Any] = {
        "GROUP": 4, "BRANCH": entry.branch, "TAIL": tail, "D": d, "D_PAD": padded(d), "DV": d_v, "DV_PAD": padded(d_v),
    }  # fmt: skip
    if which == "dkv":
        function = kernel_backward.dkv_kernel
        values |= {"BK": entry.rows, "BQ": entry.columns, "HIP": arch != CUDA}
    elif which == "dq":
        function = kernel_backward.dq_kernel
        values |= {"BM": entry.rows, "BN": entry.columns, "HIP": arch != CUDA}
    else:
        function = kernel_forward.forward_kernel
        pack = 4 if which == "decode" else 1
        values |= {"BM": entry.rows, "BN": entry.columns, "PACK": pack, "PAGED": paged}
    pointers = dict.fromkeys(("work", "pages"), "*i32") | dict.fromkeys(("lse", "shift", "delta"), "*fp32")
    pointers |= dict.fromkeys(("q", "k", "v", "out", "grad_out", "dq", "dk", "dv"), f"*{dtype}")
    floats = dict.fromkeys(("scale", "softmax_scale"), "fp32")
    signature = {
        name: "constexpr" if name in values else pointers.get(name) or floats.get(name, "i32")
        for name in function.arg_names
    }
    aligned = [
        index
        for index, name in enumerate(function.arg_names)
        if name in pointers or name.endswith(("_s", "_b", "_h"))
    ]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=values,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=TARGETS[arch], options=options(entry, hip=arch != CUDA))


def spilled(arch: str, built: Any) -> int:
    """Registers (AMD) that did not fit, or bytes of the stack (NVIDIA) that they went to."""
    if arch != CUDA:
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", built.asm["amdgcn"])[1])  # type: ignore[index]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.search(r"STACK:(\d+)", report)[1])  # type: ignore[index]


def require(arch: str, built: Any, dtype: str = "bf16") -> None:
    """One matrix instruction, one exp2 instruction, no atomic, no spill."""
    if arch == CUDA:
        code = built.asm["ptx"]
        instructions = set(re.findall(r"(wgmma\.mma_async|mma\.sync)\S*\.(?:bf16|f16)\b", code))
        assert instructions == {"wgmma.mma_async"}, instructions
        assert set(re.findall(r"ex2\S*", code)) == {"ex2.approx.ftz.f32"}
        assert not re.search(r"\b(?:red|atom)\.", code)
    else:
        code = built.asm["amdgcn"]
        wanted = INSTRUCTION[arch].format("bf16" if dtype == "bf16" else "f16")
        assert set(re.findall(r"^\s*(v_mfma\w+)", code, re.M)) == {wanted}
        assert set(re.findall(r"v_(?:exp|ldexp)\w*_f(?:16|32)\w*", code)) <= {"v_exp_f32_e32", "v_exp_f32"}
        assert "_atomic" not in code
        # A product merged into its conversion: no manual says that two roundings remain.
        assert not re.search(r"v_fma_mix(?:lo|hi)_f16", code)
    assert spilled(arch, built) <= SPILL_LIMIT[arch], f"{spilled(arch, built)} spilled"


LAUNCHES = [(arch, which, *dims) for arch in TARGETS for which in ROWS for dims in DIMENSIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "which", "d", "d_v"), LAUNCHES)
def test_a_launch_compiles_in_its_class_without_spills(arch: str, which: str, d: int, d_v: int) -> None:
    require(arch, compiled(arch, which, getattr(entries_for(arch, d), which), d, d_v))


@pytest.mark.parametrize("which", ROWS)
def test_leaving_out_the_mask_of_a_last_tile_keeps_the_class_on_hopper(which: str) -> None:
    """Where no sequence ends inside a tile; on AMD the mask always stays."""
    entry = getattr(entries_for(CUDA, 128), which)
    require(CUDA, compiled(CUDA, which, entry, 128, 128, tail=False))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("dtype", "paged"), [("fp16", False), ("bf16", True)])
def test_so_do_float16_and_pages(arch: str, dtype: str, paged: bool) -> None:
    for which in ("decode",) if paged else ROWS:
        entry = getattr(entries_for(arch, 128), which)
        require(arch, compiled(arch, which, entry, 128, 128, dtype, paged=paged), dtype)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("d_v", [64, 96, 256])
def test_the_statistics_of_rows_compile_without_contraction(arch: str, d_v: int) -> None:
    function = kernel_backward.statistics_kernel
    values = {"ROWS": 32, "LEVELS": padded(d_v).bit_length() - 1, "DV": d_v, "DV_PAD": padded(d_v)}
    pointers = dict.fromkeys(("grad_out", "out"), "*bf16") | dict.fromkeys(("lse", "shift", "delta"), "*fp32")
    signature = {
        name: "constexpr" if name in values else pointers.get(name, "i32") for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    choices = {"num_warps": 4 if arch == CUDA else 2, "num_stages": 1, "enable_fp_fusion": False}
    built = triton.compile(source, target=TARGETS[arch], options=choices)
    assert spilled(arch, built) == 0
    code = built.asm["ptx" if arch == CUDA else "amdgcn"]
    assert not re.search(r"\bfma\.rn\.f32|v_(?:pk_)?fmac?_f32", code)


def certificate(built: Any) -> Any:
    return certificate_of(Compiled(built.asm["amdgcn"], built.asm["ttgir"], int(built.metadata.shared)))


@pytest.mark.parametrize(("arch", "d"), [key for key in TABLE if key[0] != CUDA])
def test_prefill_and_decode_have_one_certificate_on_amd(arch: str, d: int) -> None:
    """Instruction, K indices, order of the row sum; over free tiles as well, but not over tiles of other keys."""
    entries = entries_for(arch, d)
    free = [entries.forward, entries.decode, Launch(64, entries.forward.columns, 4, 1, nonkdim=16)]
    found = [certificate(compiled(arch, "forward", entry, d, d)) for entry in free]
    assert not any(one.unresolved for one in found), [one.unresolved for one in found]
    assert len({(one.opcodes, one.dots, one.reductions) for one in found}) == 1
    other = Launch(64, entries.forward.columns // 2, 4, 1, nonkdim=16)
    mutant = certificate(compiled(arch, "forward", other, d, d))
    assert (mutant.dots, mutant.reductions) != (found[0].dots, found[0].reductions)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_row_is_summed_inside_one_warp_on_hopper(d: int) -> None:
    entries = entries_for(CUDA, d)
    for which in ("forward", "decode"):
        entry = getattr(entries, which)
        code = compiled(CUDA, which, entry, d, d).asm["ttgir"]
        layouts = set(re.findall(r"#ttg\.nvidia_mma<.*?warpsPerCTA = (\[[\d, ]+\])", code))
        assert layouts == {f"[{entry.num_warps}, 1]"}, (which, layouts)
