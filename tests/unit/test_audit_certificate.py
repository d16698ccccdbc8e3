"""Numerics classes of kernels that are not executed: what changes the K order or a reduction changes the class."""

import audit_kernels
import pytest

pytest.importorskip("triton")
from te_overrides.audit.certificate import certify, classes  # noqa: E402
from te_overrides.audit.compile import Kernel, launch_grid  # noqa: E402

GEMM = Kernel(
    audit_kernels.gemm,
    {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32"},
    block="BM",
)
SCORES = Kernel(
    audit_kernels.score_sums,
    {"q_ptr": "*bf16", "k_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32", "S": "i32"},
    constexprs={"D": 64},
    block="BM",
)


def gemm_classes(arch, **axes):
    fixed = {"BN": (64,), "num_warps": (4,), "matrix_instr_nonkdim": (16,), "kpack": (1,)}
    launches = launch_grid({"BM": (16,), "BK": (32,)} | fixed | axes)
    return classes(certify(GEMM, arch, launches, ("M", "N", "K")))


def test_tiles_and_warps_stay_in_one_class_when_the_instruction_is_pinned():
    for arch, kpack in (("gfx942", 2), ("gfx950", 1)):
        found = gemm_classes(arch, BM=(16, 64), BK=(32, 64), num_warps=(4, 8), kpack=(kpack,))
        assert len(found) == 1 and not found[0][0].unresolved, found


def test_a_free_choice_of_instruction_is_a_choice_by_rows():
    opcodes = {
        certificate.opcodes
        for certificate, _ in gemm_classes("gfx942", BM=(16, 64), matrix_instr_nonkdim=(0,))
    }
    assert opcodes == {("v_mfma_f32_16x16x16_bf16",), ("v_mfma_f32_32x32x8_bf16",)}


def test_kpack_keeps_the_instruction_and_changes_the_indices_that_meet_in_it():
    found = gemm_classes("gfx942", kpack=(1, 2))
    assert len(found) == 2
    assert len({certificate.opcodes for certificate, _ in found}) == 1
    by_kpack = {
        dict(launches[0].options)["kpack"]: certificate.dots[0].k_set for certificate, launches in found
    }
    assert by_kpack[1] == tuple(range(16))
    assert by_kpack[2] == (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)


def test_a_short_k_tile_changes_the_instruction_on_gfx950():
    opcodes = [certificate.opcodes for certificate, _ in gemm_classes("gfx950", BK=(16, 32))]
    assert sorted(opcodes) == [("v_mfma_f32_16x16x16_bf16",), ("v_mfma_f32_16x16x32_bf16",)]


def test_the_warps_of_a_row_sum_follow_the_tile():
    launches = launch_grid({"BM": (16, 64), "BN": (64,), "num_warps": (4,), "matrix_instr_nonkdim": (16,)})
    found = classes(certify(SCORES, "gfx950", launches, ("S",)))
    assert len(found) == 2
    layouts = {certificate.reductions[0].layout for certificate, _ in found}
    assert len(layouts) == 2 and all("warps" in layout for layout in layouts)
    assert len({certificate.dots for certificate, _ in found}) == 1
