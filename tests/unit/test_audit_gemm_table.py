"""The GEMM's launch table for AMD GPUs, from the code it compiles to: one numerics class, and the tree's own bits.

Integers up to 8 make every sum inside a lane exact in any order, so that the roundings of the lanes and of the tree
above them are compared with the reference bit by bit; which order a lane adds in is what the symbolic engine compares
between entries.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from te_overrides.audit.api import audit, execute  # noqa: E402
from te_overrides.audit.compile import Kernel, Launch  # noqa: E402
from te_overrides.audit.samples import count_differences  # noqa: E402
from te_overrides.kernels.gemm import gated_kernel, reference  # noqa: E402
from te_overrides.kernels.gemm import kernel as gemm  # noqa: E402
from te_overrides.kernels.gemm.launch_table import TABLE  # noqa: E402
from te_overrides.kernels.launching import entry_options  # noqa: E402
from te_overrides.kernels.swiglu.reference import swiglu_packed  # noqa: E402

M, N, K = 128, 128, 1024
TILE = ("BM", "BN", "BK", "GROUP")


def table(arch, operation, count, lane):
    """The kernel as the launcher calls it for contiguous operands, and its entries as launches."""
    launches, fixed = [], {}
    for entry in TABLE[arch, operation]:
        fixed = gemm.constexprs(entry, count=count, segments=1, lane=lane, out=torch.bfloat16, hip=True)
        tile = tuple((name, fixed.pop(name)) for name in TILE)
        launches.append(Launch(tile, tuple(entry_options(entry, hip=True).items())))
    integers = ("M", "N", "a_m", "b_n", "c_m", "lane_width", "segment_width")
    kernel = Kernel(
        gemm.gemm_kernel,
        dict.fromkeys(integers, "i32") | dict.fromkeys("abc", "*bf16"),
        {"M": M, "N": N, "a_m": K, "b_n": K, "c_m": N, "lane_width": K // count, "segment_width": K},
        fixed | {"a_k": 1, "b_k": 1},
        block="BM",
        sizes={"a": K // N, "b": K // M},
        programs=lambda launch, _: -(-M // launch.constexpr("BM")) * -(-N // launch.constexpr("BN")),
    )
    return kernel, launches


def bits(tensor):
    return tensor.contiguous().view(torch.uint16).numpy().ravel()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("operation", "count", "lane"), [("one_lane", 1, torch.float32), ("lane_tree", 8, torch.bfloat16)]
)
def test_every_entry_is_in_one_class_and_computes_the_reference(arch, operation, count, lane):
    kernel, launches = table(arch, operation, count, lane)
    result = audit(kernel, arch, launches, M * N)
    assert result.one_class, (result.groups, result.unknown)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, K), generator=generator).to(torch.bfloat16) for rows in (M, N))
    want = reference.one_lane(a, b) if operation == "one_lane" else reference.lane_tree(a, b, tp_size=1)
    arrays = {"a": bits(a), "b": bits(b), "c": np.zeros(M * N, np.uint16)}
    got = execute(kernel, arch, launches[-1], arrays, M * N)["c"]
    difference = count_differences(got, bits(want))
    print(arch, operation, difference)
    assert difference.differing == 0


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_gated_entry_is_in_one_class_and_computes_the_reference(arch):
    """Gate and up in float32 chains, rounded, activated: the projections kept and what is made of them."""
    columns, k = 64, 128
    launches, fixed = [], {}
    for entry in TABLE[arch, "gated"]:
        fixed = gated_kernel.constants(entry, torch.bfloat16, keep=True, hip=True)
        tile = tuple((name, fixed.pop(name)) for name in TILE)
        launches.append(Launch(tile, tuple(gated_kernel.options(entry, hip=True).items())))
    known = {"M": M, "N": columns, "K": k, "a_m": k, "b_n": k, "c_m": columns, "packed_m": 2 * columns}
    kernel = Kernel(
        gated_kernel.gated_kernel,
        dict.fromkeys(known, "i32") | dict.fromkeys(("a", "b", "c", "packed"), "*bf16"),
        known,
        fixed | {"a_k": 1, "b_k": 1},
        block="BM",
        sizes={"a": k // columns, "b": 2 * k // M, "packed": 2},
        programs=lambda launch, _: -(-M // launch.constexpr("BM")) * -(-columns // launch.constexpr("BN")),
    )
    result = audit(kernel, arch, launches, M * columns)
    assert result.one_class, (result.groups, result.unknown)
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-1, 2, (M, k), generator=generator).to(torch.bfloat16)
    b = torch.randint(-1, 2, (2 * columns, k), generator=generator).to(torch.bfloat16)
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
