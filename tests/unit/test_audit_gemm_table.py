"""The GEMM's launch table for AMD GPUs, from the code it compiles to: one numerics class, and the tree's own bits.

Integers up to 8 make every sum inside a lane exact in any order, so that the roundings of the lanes and of the tree
above them are compared with the reference bit by bit; which order a lane adds in is what the symbolic engine compares
between entries.
"""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from amd_code import gemm_instruction, matrix_instructions, spilled  # noqa: E402
from te_overrides.audit.api import audit, execute  # noqa: E402
from te_overrides.audit.compile import Kernel, Launch, compile_kernel  # noqa: E402
from te_overrides.audit.samples import count_differences  # noqa: E402
from te_overrides.kernels.gemm import gated_kernel, reference  # noqa: E402
from te_overrides.kernels.gemm import kernel as gemm  # noqa: E402
from te_overrides.kernels.gemm.launch_table import TABLE  # noqa: E402
from te_overrides.kernels.launching import entry_options  # noqa: E402
from te_overrides.kernels.swiglu.reference import swiglu_packed  # noqa: E402

# Columns are half of the largest tile, so that its mask is at work too.
M, N = 128, 64
TILE = ("BM", "BN", "BK", "GROUP")
TRITON = {torch.bfloat16: "bf16", torch.float16: "fp16"}
CASES = [
    ("one_lane", 1, torch.bfloat16, 1, False, 128),
    ("one_lane", 1, torch.float16, 1, True, 128),
    ("lane_tree", 8, torch.bfloat16, 1, False, 512),
    ("lane_tree", 4, torch.float16, 2, True, 512),
]
"""Operation, lanes, dtype, segments, whether B lies transposed (an input gradient's weight), K. Each dtype, each layout
and each number of lanes is other code at every entry."""


def table(arch, operation, count, dtype, segments, transposed, k):
    """The kernel as the launcher calls it, and its entries as launches."""
    launches, fixed = [], {}
    lane = torch.float32 if operation == "one_lane" else dtype
    for entry in TABLE[arch, operation]:
        fixed = gemm.constexprs(entry, count=count, segments=segments, lane=lane, out=dtype, hip=True)
        tile = tuple((name, fixed.pop(name)) for name in TILE)
        launches.append(Launch(tile, tuple(entry_options(entry, hip=True).items())))
    known = {"M": M, "N": N, "a_m": k, "c_m": N, "lane_width": k // segments // count}
    known |= {"segment_width": k // segments} | ({"b_k": N} if transposed else {"b_n": k})
    kernel = Kernel(
        gemm.gemm_kernel,
        dict.fromkeys(known, "i32") | dict.fromkeys("abc", f"*{TRITON[dtype]}"),
        known,
        fixed | {"a_k": 1, "b_n" if transposed else "b_k": 1},
        block="BM",
        sizes={"a": k // N, "b": k // M},
        programs=lambda launch, _: -(-M // launch.constexpr("BM")) * -(-N // launch.constexpr("BN")),
    )
    return kernel, launches


def check_code(kernel, arch, launches, dtype):
    """One matrix instruction and no spill in the code that is then certified."""
    divisible = tuple(name for name, value in kernel.scalars.items() if value % 16 == 0)
    for launch in launches:
        assembly = compile_kernel(kernel, arch, launch, divisible).assembly
        want = {gemm_instruction(arch, "bf16" if dtype is torch.bfloat16 else "f16")}
        assert matrix_instructions(assembly) == want, f"{arch} {launch}: {matrix_instructions(assembly)}"
        assert not spilled(assembly), f"{arch} {launch}: {spilled(assembly)}"
        # Of `gated`: the activation's float64 products and sums stay apart; none is merged into its conversion.
        assert not re.search(r"v_fma_mix(?:lo|hi)_f16", assembly), f"{arch} {launch}"


def bits(tensor):
    return tensor.contiguous().view(torch.uint16).numpy().ravel()


def differences(arch, case, kernel, launch):
    """Of integers, against the reference."""
    operation, count, dtype, segments, transposed, k = case
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, k), generator=generator).to(dtype) for rows in (M, N))
    if operation == "one_lane":
        want = reference.one_lane(a, b)
    else:
        want = reference.lane_tree(a, b, tp_size=8 // count, segments=[k // segments] * segments)
    arrays = {"a": bits(a), "b": bits(b.t() if transposed else b), "c": np.zeros(M * N, np.uint16)}
    difference = count_differences(execute(kernel, arch, launch, arrays, M * N)["c"], bits(want))
    print(arch, case, difference)
    return difference.differing


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_entry_is_in_one_class_and_computes_the_reference(arch, case):
    kernel, launches = table(arch, *case)
    check_code(kernel, arch, launches, case[2])
    result = audit(kernel, arch, launches, M * N)
    assert result.one_class, (result.groups, result.unknown)
    assert differences(arch, case, kernel, launches[-1]) == 0


@pytest.mark.parametrize("count", [2, 1])
def test_fewer_lanes_leave_the_tree_at_another_level(count):
    case = ("lane_tree", count, torch.bfloat16, 1, False, 256)
    kernel, launches = table("gfx950", *case)
    assert differences("gfx950", case, kernel, launches[-1]) == 0


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_every_gated_entry_is_in_one_class_and_computes_the_reference(arch, dtype):
    """Gate and up in float32 chains, rounded, activated: the projections kept and what is made of them."""
    columns, k = 64, 128
    launches, fixed = [], {}
    for entry in TABLE[arch, "gated"]:
        fixed = gated_kernel.constants(entry, dtype, keep=True, hip=True)
        tile = tuple((name, fixed.pop(name)) for name in TILE)
        launches.append(Launch(tile, tuple(gated_kernel.options(entry, hip=True).items())))
    known = {"M": M, "N": columns, "K": k, "a_m": k, "b_n": k, "c_m": columns, "packed_m": 2 * columns}
    kernel = Kernel(
        gated_kernel.gated_kernel,
        dict.fromkeys(known, "i32") | dict.fromkeys(("a", "b", "c", "packed"), f"*{TRITON[dtype]}"),
        known,
        fixed | {"a_k": 1, "b_k": 1},
        block="BM",
        sizes={"a": k // columns, "b": 2 * k // M, "packed": 2},
        programs=lambda launch, _: -(-M // launch.constexpr("BM")) * -(-columns // launch.constexpr("BN")),
    )
    check_code(kernel, arch, launches, dtype)
    result = audit(kernel, arch, launches, M * columns)
    assert result.one_class, (result.groups, result.unknown)
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-1, 2, (M, k), generator=generator).to(dtype)
    b = torch.randint(-1, 2, (2 * columns, k), generator=generator).to(dtype)
    packed = reference.one_lane(a, b)
    arrays = {
        "a": bits(a),
        "b": bits(b),
        "c": np.zeros(M * columns, np.uint16),
        "packed": np.zeros(packed.numel(), np.uint16),
    }
    got = execute(kernel, arch, launches[-1], arrays, M * columns)
    for name, want in (("packed", packed), ("c", swiglu_packed(packed))):
        difference = count_differences(got[name], bits(want))
        print(arch, name, difference)
        assert difference.differing == 0
