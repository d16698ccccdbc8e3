"""Operands, modifiers, labels and directives of LLVM's text."""

import pytest

from te_overrides.audit.decode import DecodeError, decode

TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
k:
	s_load_dwordx2 s[2:3], s[0:1], 0x8
	s_waitcnt lgkmcnt(0)
	v_cmp_lt_f32_e64 vcc, |v16|, -s2
	s_cbranch_execz .LBB0_2
	v_pk_add_f32 v[12:13], v[6:7], v[8:9] op_sel:[1,0] neg_lo:[0,1] neg_hi:[0,1]
	v_mul_f32_e64 v1, v2, 0.5 clamp mul:2
	v_add_f32_sdwa v1, v2, v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD
	global_load_dword v7, v[2:3], off offset:-4 nt
	buffer_load_dword v7, v2, s[4:7], 0 offen offset:16
.LBB0_2:
	s_endpgm
.Lfunc_end0:
	.amdhsa_kernel k
		.amdhsa_user_sgpr_count 12
	.end_amdhsa_kernel
"""


@pytest.fixture(scope="module")
def program():
    return decode(TEXT)


def test_registers_signs_and_special_names(program):
    compare = program.instructions[2]
    assert (compare.opcode, compare.encoding) == ("v_cmp_lt_f32", "e64")
    vcc, left, right = compare.operands
    assert (vcc.kind, vcc.index, vcc.count) == ("s", 106, 2)
    assert (left.kind, left.index, left.abs, left.neg) == ("v", 16, True, False)
    assert (right.kind, right.index, right.abs, right.neg) == ("s", 2, False, True)


def test_modifiers_of_packed_math_output_and_subregisters(program):
    packed, scaled, sub = program.instructions[4:7]
    assert packed.modifiers == {"op_sel": (1, 0), "neg_lo": (0, 1), "neg_hi": (0, 1)}
    assert scaled.modifiers == {"clamp": True, "mul": "2"} and scaled.operands[2].value == 0.5
    assert sub.modifiers["src0_sel"] == "WORD_1"


def test_memory_operands(program):
    load, buffer = program.instructions[7:9]
    assert [operand.kind for operand in load.operands] == ["v", "v", "off"]
    assert load.modifiers == {"offset": "-4", "nt": True}
    assert buffer.operands[2].count == 4 and buffer.modifiers == {"offset": "16", "offen": True}


def test_labels_and_directives(program):
    assert program.labels == {".LBB0_2": 9} and program.instructions[9].opcode == "s_endpgm"
    assert program.directives["user_sgpr_count"] == 12 and program.arch == "gfx950"


def test_text_that_is_no_kernel_is_refused():
    with pytest.raises(DecodeError, match="expected one kernel"):
        decode("v_nop")
