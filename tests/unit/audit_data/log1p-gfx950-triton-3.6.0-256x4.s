	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.amdhsa_code_object_version 5
	.text
	.globl	unary
	.type	unary,@function
unary:
.Lfunc_begin0:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_load_dwordx8 s[4:11], s[0:1], 0x8
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_0
.LBB0_0:
	v_lshl_or_b32 v0, s12, 8, v0
	v_ashrrev_i32_e32 v1, 31, v0
	v_lshlrev_b64 v[0:1], 2, v[0:1]
	v_lshl_add_u64 v[2:3], s[2:3], 0, v[0:1]
	global_load_dword v16, v[2:3], off
	s_mov_b32 s0, 0x3f2aaaab
	v_mov_b32_e32 v3, 0x3ecc95a3
	v_mov_b32_e32 v2, 0x3f317218
	s_mov_b32 s1, 0x3f317218
	s_mov_b32 s2, 0x7f800000
	v_mov_b32_e32 v17, 0x7f800000
	v_mov_b32_e32 v18, 0x7fc00000
	v_mov_b32_e32 v19, 0xff800000
	s_mov_b32 s3, 0x33800000
	v_lshl_add_u64 v[0:1], s[4:5], 0, v[0:1]
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v6, 1.0, v16
	v_add_f32_e32 v7, -1.0, v6
	v_cvt_f64_f32_e32 v[4:5], v6
	v_frexp_mant_f32_e32 v8, v6
	v_sub_f32_e32 v9, v7, v6
	v_frexp_exp_i32_f64_e32 v4, v[4:5]
	v_cmp_gt_f32_e32 vcc, s0, v8
	v_sub_f32_e32 v7, v16, v7
	v_add_f32_e32 v5, 1.0, v9
	v_subbrev_co_u32_e32 v8, vcc, 0, v4, vcc
	v_add_f32_e32 v5, v7, v5
	v_sub_u32_e32 v7, 0, v8
	v_ldexp_f32 v6, v6, v7
	v_cvt_f32_i32_e32 v4, v8
	v_add_f32_e32 v8, -1.0, v6
	v_add_f32_e32 v9, 1.0, v6
	v_ldexp_f32 v5, v5, v7
	v_add_f32_e32 v7, 1.0, v8
	v_add_f32_e32 v10, -1.0, v9
	v_sub_f32_e32 v7, v6, v7
	v_sub_f32_e32 v6, v6, v10
	v_add_f32_e32 v10, v5, v7
	v_add_f32_e32 v5, v5, v6
	v_add_f32_e32 v14, v9, v5
	v_rcp_f32_e32 v15, v14
	v_add_f32_e32 v7, v8, v10
	v_sub_f32_e32 v6, v14, v9
	v_sub_f32_e32 v8, v7, v8
	v_sub_f32_e32 v5, v5, v6
	v_mul_f32_e32 v6, v7, v15
	v_sub_f32_e32 v20, v10, v8
	v_mul_f32_e32 v8, v14, v6
	v_fma_f32 v10, v6, v14, -v8
	v_fmac_f32_e32 v10, v6, v5
	v_fma_f32 v6, v14, v6, v10
	v_sub_f32_e32 v9, v7, v6
	v_mov_b32_e32 v11, v6
	v_pk_add_f32 v[12:13], v[6:7], v[8:9] neg_lo:[0,1] neg_hi:[0,1]
	v_cmp_neq_f32_e32 vcc, s2, v16
	v_pk_add_f32 v[10:11], v[12:13], v[10:11] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_add_f32_e32 v6, v20, v11
	v_add_f32_e32 v8, v10, v6
	v_add_f32_e32 v11, v9, v8
	v_mul_f32_e32 v10, v15, v11
	v_sub_f32_e32 v9, v9, v11
	v_mul_f32_e32 v6, v14, v10
	v_add_f32_e32 v13, v8, v9
	v_fma_f32 v8, v10, v14, -v6
	v_fma_f32 v12, v7, v15, v10
	v_fmac_f32_e32 v8, v10, v5
	v_fma_f32 v7, -v7, v15, v12
	v_fma_f32 v10, v14, v10, v8
	v_fma_f32 v20, v15, v11, -v7
	v_sub_f32_e32 v7, v11, v10
	v_mov_b32_e32 v9, v10
	v_pk_add_f32 v[10:11], v[10:11], v[6:7] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[8:9], v[10:11], v[8:9] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_add_f32_e32 v5, v13, v9
	v_add_f32_e32 v5, v8, v5
	v_add_f32_e32 v5, v7, v5
	v_fmac_f32_e32 v20, v15, v5
	v_add_f32_e32 v5, v12, v20
	v_mul_f32_e32 v6, v5, v5
	v_sub_f32_e32 v8, v5, v12
	v_fmac_f32_e32 v3, 0x3e9b6dac, v6
	v_ldexp_f32 v7, v5, 1
	v_sub_f32_e32 v8, v20, v8
	v_mul_f32_e32 v5, v5, v6
	v_fmaak_f32 v3, v6, v3, 0x3f2aaada
	v_ldexp_f32 v12, v8, 1
	v_pk_mul_f32 v[8:9], v[4:5], v[2:3]
	s_nop 0
	v_fma_f32 v6, v4, s1, -v8
	v_fmamk_f32 v6, v4, 0xb102e308, v6
	v_pk_fma_f32 v[10:11], v[4:5], v[2:3], v[6:7]
	s_nop 0
	v_sub_f32_e32 v13, v11, v7
	v_pk_fma_f32 v[2:3], v[4:5], v[2:3], v[10:11] neg_lo:[1,0,0] neg_hi:[1,0,0]
	v_mov_b32_e32 v7, v10
	v_sub_f32_e32 v3, v9, v13
	v_add_f32_e32 v9, v12, v3
	v_pk_add_f32 v[12:13], v[10:11], v[8:9]
	v_mov_b32_e32 v4, v9
	v_mov_b32_e32 v3, v13
	v_pk_add_f32 v[14:15], v[6:7], v[2:3] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[2:3], v[6:7], v[2:3]
	v_mov_b32_e32 v8, v13
	v_pk_add_f32 v[6:7], v[2:3], v[10:11] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v9, v3
	v_pk_add_f32 v[12:13], v[12:13], v[6:7] op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mov_b32 v[6:7], v[10:11], v[6:7] op_sel:[1,0]
	v_mov_b32_e32 v5, v10
	v_pk_add_f32 v[6:7], v[8:9], v[6:7] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v12, v14
	v_pk_add_f32 v[4:5], v[4:5], v[6:7] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v15, v3
	v_pk_add_f32 v[6:7], v[12:13], v[4:5]
	s_nop 0
	v_pk_add_f32 v[8:9], v[6:7], v[6:7] op_sel:[0,1] op_sel_hi:[1,0]
	s_nop 0
	v_pk_add_f32 v[2:3], v[2:3], v[8:9] op_sel:[1,0] op_sel_hi:[0,1]
	v_mov_b32_e32 v7, v2
	v_mov_b32_e32 v5, v8
	v_pk_add_f32 v[8:9], v[6:7], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_sub_f32_e32 v3, v6, v8
	v_pk_add_f32 v[4:5], v[4:5], v[8:9] neg_lo:[0,1] neg_hi:[0,1]
	v_sub_f32_e32 v3, v14, v3
	v_add_f32_e32 v3, v4, v3
	v_add_f32_e32 v3, v3, v5
	v_add_f32_e32 v2, v2, v3
	v_cndmask_b32_e32 v2, v17, v2, vcc
	v_cmp_ngt_f32_e32 vcc, -1.0, v16
	s_nop 1
	v_cndmask_b32_e32 v2, v18, v2, vcc
	v_cmp_neq_f32_e32 vcc, -1.0, v16
	s_nop 1
	v_cndmask_b32_e32 v2, v19, v2, vcc
	v_cmp_lt_f32_e64 vcc, |v16|, s3
	s_nop 1
	v_cndmask_b32_e32 v2, v2, v16, vcc
	global_store_dword v[0:1], v2, off
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel unary
		.amdhsa_group_segment_fixed_size 0
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_kernarg_size 40
		.amdhsa_user_sgpr_count 12
		.amdhsa_user_sgpr_dispatch_ptr 0
		.amdhsa_user_sgpr_queue_ptr 0
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_dispatch_id 0
		.amdhsa_user_sgpr_kernarg_preload_length 10
		.amdhsa_user_sgpr_kernarg_preload_offset 0
		.amdhsa_user_sgpr_private_segment_size 0
		.amdhsa_uses_dynamic_stack 0
		.amdhsa_enable_private_segment 0
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 0
		.amdhsa_system_sgpr_workgroup_id_z 0
		.amdhsa_system_sgpr_workgroup_info 0
		.amdhsa_system_vgpr_workitem_id 0
		.amdhsa_next_free_vgpr 21
		.amdhsa_next_free_sgpr 13
		.amdhsa_accum_offset 24
		.amdhsa_reserve_vcc 1
		.amdhsa_reserve_xnack_mask 1
		.amdhsa_float_round_mode_32 0
		.amdhsa_float_round_mode_16_64 0
		.amdhsa_float_denorm_mode_32 3
		.amdhsa_float_denorm_mode_16_64 3
		.amdhsa_dx10_clamp 1
		.amdhsa_ieee_mode 1
		.amdhsa_fp16_overflow 0
		.amdhsa_tg_split 0
		.amdhsa_exception_fp_ieee_invalid_op 0
		.amdhsa_exception_fp_denorm_src 0
		.amdhsa_exception_fp_ieee_div_zero 0
		.amdhsa_exception_fp_ieee_overflow 0
		.amdhsa_exception_fp_ieee_underflow 0
		.amdhsa_exception_fp_ieee_inexact 0
		.amdhsa_exception_int_div_zero 0
	.end_amdhsa_kernel
	.text
.Lfunc_end0:
	.text
	.text
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .address_space:  global
        .offset:         8
        .size:           8
        .value_kind:     global_buffer
      - .offset:         16
        .size:           4
        .value_kind:     by_value
      - .address_space:  global
        .offset:         24
        .size:           8
        .value_kind:     global_buffer
      - .address_space:  global
        .offset:         32
        .size:           8
        .value_kind:     global_buffer
    .group_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .kernarg_segment_size: 40
    .max_flat_workgroup_size: 256
    .name:           unary
    .private_segment_fixed_size: 0
    .sgpr_count:     19
    .sgpr_spill_count: 0
    .symbol:         unary.kd
    .uniform_work_group_size: 1
    .uses_dynamic_stack: false
    .vgpr_count:     21
    .vgpr_spill_count: 0
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx950
amdhsa.version:
  - 1
  - 2
...
	.end_amdgpu_metadata
