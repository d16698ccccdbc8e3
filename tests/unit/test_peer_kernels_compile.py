"""The peer-to-peer kernels compile for GPUs that are not here: flags at system scope, nothing spilled, one order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from te_overrides.kernels.collectives import peer, peer_kernel  # noqa: E402

KERNELS = (peer_kernel.reduce_scatter_kernel, peer_kernel.all_reduce_kernel, peer_kernel.all_gather_kernel)


def compiled(target: GPUTarget, function: Any, world: int, element: str, block: int) -> Any:
    threads = 512 if block == 4096 else 128
    names = {"bf16": triton.language.bfloat16, "fp32": triton.language.float32, "u8": triton.language.uint8}
    constants = {
        "WORLD": world,
        "LEVELS": world.bit_length() - 1,
        "DTYPE": names[element],
        "ADDED": names[element],
        "BLOCK": block,
        "SHARED": True,
        "TARGET": target.backend,
        "THREADS": threads,
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    pointers = {"x": f"*{element}", "out": f"*{element}", "staging": "*i64", "flags": "*i64"}
    types = (
        pointers
        | {"state": "*i32", "missing": "*i32", "limit": "i64"}
        | dict.fromkeys(constants, "constexpr")
    )
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "i32") for name in function.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(6)},
    )
    options = {"num_warps": threads // target.warp_size, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def element_of(function: Any) -> str:
    return "u8" if function is peer_kernel.all_gather_kernel else "bf16"


def assert_stores_arrive_before_flags(code: str) -> None:
    """Every wave waits for its own stores: the barrier and the release do not wait for another wave's."""
    # Up to the first flag; loops are laid out before what follows them.
    head = code[: code.index("buffer_wbl2")]
    last_store = [match.start() for match in re.finditer(r"(?:global|flat|buffer)_store", head)][-1]
    assert re.search(r"ASMSTART\s+s_waitcnt vmcnt\(0\)\s+v_mov_b32.*?s_barrier", head[last_store:], re.DOTALL)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("function", KERNELS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    ("world", "block"), [(world, block) for world in peer.WORLDS for block in (512, 4096)]
)
def test_it_compiles_for_amd_without_spills(arch: str, function: Any, world: int, block: int) -> None:
    built = compiled(GPUTarget("hip", arch, 64), function, world, element_of(function), block)
    code = built.asm["amdgcn"]
    spilled = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)
    assert len(spilled) == 2 and set(spilled) == {"0"}
    # Flags are set and taken by compare-and-swap; what others wrote is fetched from where they see it too.
    assert "global_atomic_cmpswap" in code
    assert "buffer_inv" in code and "buffer_wbl2" in code
    assert "s_memrealtime" in code
    assert_stores_arrive_before_flags(code)
    assert not re.search(r"atomic_(?:pk_)?add_(?:f|bf)", code)


def spilled_on_nvidia(ptx: str, folder: Path) -> int:
    """Bytes of spill stores, by the first of Triton's assemblers that takes this version of PTX."""
    import triton.backends.nvidia as backend

    (folder / "kernel.ptx").write_text(ptx)
    reports = []
    for tool in sorted((Path(backend.__file__).parent / "bin").glob("ptxas*")):
        command = [str(tool), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        reports.append(done.stderr)
        if done.returncode == 0:
            return sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
    raise AssertionError(f"no assembler takes it: {reports}")


@pytest.mark.parametrize("function", KERNELS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("block", [512, 4096])
def test_it_compiles_for_nvidia_without_spills(function: Any, block: int, tmp_path: Path) -> None:
    """For the largest world, and with waits that all threads of a program end together."""
    built = compiled(GPUTarget("cuda", 90, 32), function, max(peer.WORLDS), element_of(function), block)
    assert spilled_on_nvidia(built.asm["ptx"], tmp_path) == 0
    assert re.search(r"atom\.\S*release\.sys\.\S*cas", built.asm["ptx"])
    assert re.search(r"atom\.\S*acquire\.sys\.\S*cas", built.asm["ptx"])
    # Every reading of the clock is one number for the whole program: a maximum over a layout that repeats no thread.
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*?)\}>", built.asm["ttgir"]))
    clocks = re.findall(
        r"%globaltimer.*-> tensor<(\d+)xi64, (#\w+)>\s.*\n\s+%\S+ = \"tt.reduce\"", built.asm["ttgir"]
    )
    assert clocks and len(clocks) == built.asm["ttgir"].count("%globaltimer")
    for threads, layout in clocks:
        warps = int(threads) // 32
        assert f"sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [{warps}]" in layouts[layout]


def test_one_list_of_worlds_serves_the_declaration_and_the_launches() -> None:
    assert all(world & (world - 1) == 0 for world in peer.WORLDS)
    assert peer.flag_words(max(peer.WORLDS)) == 2 * peer.MOST_PROGRAMS * max(peer.WORLDS)
