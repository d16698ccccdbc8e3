"""GEMM followed through shared memory and matrix instructions: exact on integers, and sorted into classes."""

import audit_kernels
import numpy as np
import pytest

pytest.importorskip("triton")
from te_overrides.audit.api import audit, execute  # noqa: E402
from te_overrides.audit.compile import Kernel, launch_grid  # noqa: E402

M, N, K = 64, 64, 128
GEMM = Kernel(
    audit_kernels.gemm,
    {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32"},
    scalars={"M": M, "N": N, "K": K},
    block="BM",
    sizes={"a_ptr": K // N, "b_ptr": K // M},
    programs=lambda launch, _: (M // launch.constexpr("BM")) * (N // launch.constexpr("BN")),
)
TILES = {"BM": (16, 64), "BN": (32, 64), "BK": (32, 64), "num_warps": (4,)}


def bfloat16(values):
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).ravel()


@pytest.mark.parametrize(("arch", "kpack"), [("gfx942", 2), ("gfx950", 1)])
def test_every_tile_multiplies_integers_exactly_and_all_are_one_class(arch, kpack):
    launches = launch_grid(TILES | {"matrix_instr_nonkdim": (16,), "kpack": (kpack,)})
    result = audit(GEMM, arch, launches, M * N)
    assert result.one_class, (result.groups, result.unknown)
    generator = np.random.default_rng(0)
    a, b = generator.integers(-8, 9, (M, K)), generator.integers(-8, 9, (K, N))
    arrays = {"a_ptr": bfloat16(a), "b_ptr": bfloat16(b), "c_ptr": np.zeros(M * N, np.float32)}
    for launch in launches:
        got = execute(GEMM, arch, launch, arrays, M * N)["c_ptr"].reshape(M, N)
        assert np.array_equal(got, (a @ b).astype(np.float32)), str(launch)


def test_the_instruction_by_rows_and_kpack_are_four_classes_on_gfx942():
    launches = launch_grid(
        {
            "BM": (16, 64),
            "BN": (64,),
            "BK": (32,),
            "num_warps": (4,),
            "matrix_instr_nonkdim": (0,),
            "kpack": (1, 2),
        }
    )
    result = audit(GEMM, "gfx942", launches, M * N)
    assert len(result.groups) == 4 and not result.unknown
    assert all(group.elements_apart == M * N for group in result.groups[1:])
