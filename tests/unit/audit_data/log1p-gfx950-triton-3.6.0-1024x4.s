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
	s_lshl_b32 s0, s12, 10
	v_lshl_or_b32 v0, v0, 2, s0
	v_ashrrev_i32_e32 v1, 31, v0
	v_lshlrev_b64 v[4:5], 2, v[0:1]
	v_lshl_add_u64 v[0:1], s[2:3], 0, v[4:5]
	global_load_dwordx4 v[0:3], v[0:1], off
	s_mov_b32 s1, 0x3f2aaaab
	s_mov_b32 s10, 0x3ecc95a3
	s_mov_b32 s6, 0x3e9b6dac
	v_mov_b64_e32 v[6:7], s[10:11]
	s_mov_b32 s8, 0x3f2aaada
	s_mov_b32 s0, 0x3f317218
	s_mov_b32 s2, 0xb102e308
	v_lshl_add_u64 v[4:5], s[4:5], 0, v[4:5]
	s_mov_b32 s4, 0x33800000
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v13, 1.0, v1
	v_cvt_f64_f32_e32 v[10:11], v13
	v_frexp_mant_f32_e32 v17, v13
	v_add_f32_e32 v12, 1.0, v0
	v_frexp_exp_i32_f64_e32 v10, v[10:11]
	v_cmp_gt_f32_e32 vcc, s1, v17
	v_add_f32_e32 v14, -1.0, v12
	v_cvt_f64_f32_e32 v[8:9], v12
	v_frexp_mant_f32_e32 v15, v12
	v_add_f32_e32 v16, -1.0, v13
	v_subbrev_co_u32_e32 v10, vcc, 0, v10, vcc
	v_sub_f32_e32 v18, v14, v12
	v_frexp_exp_i32_f64_e32 v8, v[8:9]
	v_sub_f32_e32 v9, v16, v13
	v_cmp_gt_f32_e32 vcc, s1, v15
	v_sub_f32_e32 v14, v0, v14
	v_sub_f32_e32 v16, v1, v16
	v_add_f32_e32 v11, 1.0, v18
	v_add_f32_e32 v9, 1.0, v9
	v_subbrev_co_u32_e32 v8, vcc, 0, v8, vcc
	v_add_f32_e32 v11, v14, v11
	v_add_f32_e32 v14, v16, v9
	v_sub_u32_e32 v15, 0, v8
	v_sub_u32_e32 v16, 0, v10
	v_cvt_f32_i32_e32 v9, v10
	v_ldexp_f32 v10, v12, v15
	v_ldexp_f32 v12, v11, v15
	v_ldexp_f32 v11, v13, v16
	v_ldexp_f32 v13, v14, v16
	v_pk_add_f32 v[14:15], v[10:11], 1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[16:17], v[10:11], -1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[18:19], v[14:15], -1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[20:21], v[16:17], 1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[18:19], v[10:11], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[10:11], v[10:11], v[20:21] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[18:19], v[12:13], v[18:19]
	v_pk_add_f32 v[10:11], v[12:13], v[10:11]
	v_pk_add_f32 v[26:27], v[14:15], v[18:19]
	v_pk_add_f32 v[28:29], v[16:17], v[10:11]
	v_rcp_f32_e32 v30, v26
	v_rcp_f32_e32 v31, v27
	v_pk_add_f32 v[14:15], v[26:27], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[16:17], v[28:29], v[16:17] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[14:15], v[18:19], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[18:19], v[28:29], v[30:31]
	v_pk_add_f32 v[10:11], v[10:11], v[16:17] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[36:37], v[26:27], v[18:19]
	v_cvt_f32_i32_e32 v8, v8
	v_pk_fma_f32 v[36:37], v[18:19], v[26:27], v[36:37] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_mul_f32 v[22:23], v[8:9], s[0:1] op_sel_hi:[1,0]
	v_pk_fma_f32 v[36:37], v[18:19], v[14:15], v[36:37]
	v_pk_fma_f32 v[20:21], v[8:9], s[0:1], v[22:23] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_fma_f32 v[38:39], v[26:27], v[18:19], v[36:37]
	v_pk_fma_f32 v[20:21], v[8:9], s[2:3], v[20:21] op_sel_hi:[1,0,1]
	v_pk_add_f32 v[40:41], v[28:29], v[38:39] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_fma_f32 v[18:19], v[26:27], v[18:19], v[38:39] neg_lo:[1,0,0] neg_hi:[1,0,0]
	v_pk_add_f32 v[42:43], v[28:29], v[40:41] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[18:19], v[18:19], v[36:37] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[36:37], v[42:43], v[38:39] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_fma_f32 v[8:9], v[8:9], s[0:1], v[20:21] op_sel_hi:[1,0,1]
	v_pk_add_f32 v[10:11], v[10:11], v[36:37]
	v_mov_b32_e32 v25, v23
	v_pk_add_f32 v[10:11], v[18:19], v[10:11]
	v_mov_b32_e32 v35, v21
	v_pk_add_f32 v[18:19], v[40:41], v[10:11]
	v_mov_b32_e32 v24, v8
	v_pk_mul_f32 v[36:37], v[30:31], v[18:19]
	v_pk_add_f32 v[38:39], v[40:41], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[42:43], v[26:27], v[36:37]
	v_pk_add_f32 v[10:11], v[10:11], v[38:39]
	v_pk_fma_f32 v[38:39], v[36:37], v[26:27], v[42:43] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_fma_f32 v[40:41], v[28:29], v[30:31], v[36:37]
	v_pk_fma_f32 v[14:15], v[36:37], v[14:15], v[38:39]
	v_pk_fma_f32 v[28:29], v[28:29], v[30:31], v[40:41] neg_lo:[1,0,0] neg_hi:[1,0,0]
	v_pk_fma_f32 v[38:39], v[26:27], v[36:37], v[14:15]
	v_pk_fma_f32 v[28:29], v[30:31], v[18:19], v[28:29] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_add_f32 v[42:43], v[18:19], v[38:39] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_fma_f32 v[26:27], v[26:27], v[36:37], v[38:39] neg_lo:[1,0,0] neg_hi:[1,0,0]
	v_pk_add_f32 v[18:19], v[18:19], v[42:43] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[14:15], v[26:27], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[18:19], v[18:19], v[38:39] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v16, v8
	v_pk_add_f32 v[10:11], v[10:11], v[18:19]
	v_mov_b32_e32 v12, v22
	v_pk_add_f32 v[10:11], v[14:15], v[10:11]
	v_mov_b32_e32 v32, v20
	v_pk_add_f32 v[10:11], v[42:43], v[10:11]
	s_mov_b32 s3, 0x7f800000
	v_pk_fma_f32 v[10:11], v[30:31], v[10:11], v[28:29]
	v_mov_b32_e32 v36, 0x7f800000
	v_pk_add_f32 v[14:15], v[40:41], v[10:11]
	v_cmp_neq_f32_e32 vcc, s3, v0
	v_pk_add_f32 v[18:19], v[14:15], v[40:41] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[28:29], v[14:15], v[14:15]
	v_pk_add_f32 v[10:11], v[10:11], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_fma_f32 v[18:19], v[28:29], s[6:7], v[6:7] op_sel_hi:[1,0,0]
	v_ldexp_f32 v26, v14, 1
	v_ldexp_f32 v27, v15, 1
	v_pk_mul_f32 v[14:15], v[14:15], v[28:29]
	v_pk_fma_f32 v[18:19], v[28:29], v[18:19], s[8:9] op_sel_hi:[1,1,0]
	v_ldexp_f32 v33, v11, 1
	v_pk_fma_f32 v[28:29], v[14:15], v[18:19], v[26:27]
	v_ldexp_f32 v10, v10, 1
	v_pk_add_f32 v[26:27], v[28:29], v[26:27] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v11, v33
	v_pk_fma_f32 v[14:15], v[14:15], v[18:19], v[26:27] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_mov_b32_e32 v17, v29
	v_pk_add_f32 v[18:19], v[10:11], v[14:15]
	v_mov_b32_e32 v13, v15
	v_pk_add_f32 v[26:27], v[28:29], v[18:19]
	v_mov_b32_e32 v15, v29
	v_mov_b32_e32 v11, v19
	v_mov_b32_e32 v34, v26
	v_mov_b32_e32 v31, v19
	v_pk_add_f32 v[10:11], v[10:11], v[14:15]
	v_mov_b32_e32 v30, v26
	v_pk_add_f32 v[14:15], v[24:25], v[34:35]
	v_pk_add_f32 v[16:17], v[16:17], v[30:31]
	v_pk_add_f32 v[30:31], v[8:9], v[26:27]
	v_pk_add_f32 v[14:15], v[14:15], v[24:25] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[12:13], v[12:13], v[32:33]
	v_pk_add_f32 v[24:25], v[34:35], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v32, v26
	v_mov_b32_e32 v33, v31
	v_mov_b32_e32 v34, v28
	v_mov_b32_e32 v35, v9
	v_pk_add_f32 v[32:33], v[32:33], v[34:35] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v34, v8
	v_mov_b32_e32 v35, v31
	v_mov_b32_e32 v23, v33
	v_pk_add_f32 v[22:23], v[34:35], v[22:23] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v35, v15
	v_mov_b32_e32 v34, v22
	v_mov_b32_e32 v15, v29
	v_pk_add_f32 v[34:35], v[20:21], v[34:35] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[14:15], v[16:17], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v21, v9
	v_pk_add_f32 v[16:17], v[26:27], v[28:29] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[12:13], v[12:13], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[8:9], v[20:21], v[22:23] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[10:11], v[10:11], v[32:33] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[14:15], v[18:19], v[16:17] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[16:17], v[10:11], v[8:9]
	v_mov_b32_e32 v11, v13
	v_pk_add_f32 v[18:19], v[24:25], v[12:13]
	v_pk_add_f32 v[10:11], v[34:35], v[10:11]
	v_mov_b32_e32 v9, v25
	v_pk_add_f32 v[10:11], v[10:11], v[8:9] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v12, v16
	v_mov_b32_e32 v13, v19
	v_pk_add_f32 v[12:13], v[12:13], v[10:11] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[10:11], v[14:15], v[10:11] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[8:9], v[8:9], v[12:13] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v37, 0x7fc00000
	v_pk_add_f32 v[8:9], v[10:11], v[8:9]
	v_pk_add_f32 v[10:11], v[18:19], v[16:17]
	v_mov_b32_e32 v38, 0xff800000
	v_pk_add_f32 v[12:13], v[30:31], v[10:11]
	v_add_f32_e32 v18, 1.0, v3
	v_pk_add_f32 v[14:15], v[12:13], v[30:31] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[10:11], v[10:11], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[8:9], v[8:9], v[10:11]
	v_add_f32_e32 v10, 1.0, v2
	v_pk_add_f32 v[8:9], v[12:13], v[8:9]
	v_frexp_mant_f32_e32 v13, v10
	v_cndmask_b32_e32 v8, v36, v8, vcc
	v_cmp_neq_f32_e32 vcc, s3, v1
	s_nop 1
	v_cndmask_b32_e32 v9, v36, v9, vcc
	v_cmp_ngt_f32_e32 vcc, -1.0, v1
	s_nop 1
	v_cndmask_b32_e32 v9, v37, v9, vcc
	v_cmp_ngt_f32_e32 vcc, -1.0, v0
	s_nop 1
	v_cndmask_b32_e32 v8, v37, v8, vcc
	v_cmp_neq_f32_e32 vcc, -1.0, v0
	s_nop 1
	v_cndmask_b32_e32 v8, v38, v8, vcc
	v_cmp_neq_f32_e32 vcc, -1.0, v1
	s_nop 1
	v_cndmask_b32_e32 v9, v38, v9, vcc
	v_cmp_lt_f32_e64 vcc, |v1|, s4
	s_nop 1
	v_cndmask_b32_e32 v1, v9, v1, vcc
	v_cmp_lt_f32_e64 vcc, |v0|, s4
	s_nop 1
	v_cndmask_b32_e32 v0, v8, v0, vcc
	v_add_f32_e32 v8, -1.0, v10
	v_sub_f32_e32 v9, v8, v10
	v_add_f32_e32 v9, 1.0, v9
	v_sub_f32_e32 v8, v2, v8
	v_add_f32_e32 v11, v8, v9
	v_cvt_f64_f32_e32 v[8:9], v10
	v_frexp_exp_i32_f64_e32 v12, v[8:9]
	v_add_f32_e32 v8, -1.0, v18
	v_sub_f32_e32 v9, v8, v18
	v_add_f32_e32 v9, 1.0, v9
	v_sub_f32_e32 v8, v3, v8
	v_add_f32_e32 v19, v8, v9
	v_cvt_f64_f32_e32 v[8:9], v18
	v_frexp_exp_i32_f64_e32 v8, v[8:9]
	v_frexp_mant_f32_e32 v9, v18
	v_cmp_gt_f32_e32 vcc, s1, v9
	s_nop 1
	v_subbrev_co_u32_e32 v20, vcc, 0, v8, vcc
	v_cmp_gt_f32_e32 vcc, s1, v13
	v_sub_u32_e32 v13, 0, v20
	v_cvt_f32_i32_e32 v9, v20
	v_subbrev_co_u32_e32 v12, vcc, 0, v12, vcc
	v_cvt_f32_i32_e32 v8, v12
	v_sub_u32_e32 v12, 0, v12
	v_ldexp_f32 v10, v10, v12
	v_ldexp_f32 v12, v11, v12
	v_ldexp_f32 v11, v18, v13
	v_ldexp_f32 v13, v19, v13
	v_pk_add_f32 v[18:19], v[10:11], 1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[26:27], v[10:11], -1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[20:21], v[18:19], -1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[28:29], v[26:27], 1.0 op_sel_hi:[1,0]
	v_pk_add_f32 v[20:21], v[10:11], v[20:21] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[10:11], v[10:11], v[28:29] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[20:21], v[12:13], v[20:21]
	v_pk_add_f32 v[10:11], v[12:13], v[10:11]
	v_pk_add_f32 v[22:23], v[18:19], v[20:21]
	v_pk_add_f32 v[12:13], v[26:27], v[10:11]
	v_rcp_f32_e32 v24, v22
	v_rcp_f32_e32 v25, v23
	v_pk_add_f32 v[18:19], v[22:23], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[26:27], v[12:13], v[26:27] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[18:19], v[20:21], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[28:29], v[12:13], v[24:25]
	v_pk_add_f32 v[10:11], v[10:11], v[26:27] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[30:31], v[22:23], v[28:29]
	v_pk_mul_f32 v[14:15], v[8:9], s[0:1] op_sel_hi:[1,0]
	v_pk_fma_f32 v[20:21], v[28:29], v[22:23], v[30:31] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_fma_f32 v[16:17], v[8:9], s[0:1], v[14:15] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_fma_f32 v[20:21], v[28:29], v[18:19], v[20:21]
	v_pk_fma_f32 v[16:17], v[8:9], s[2:3], v[16:17] op_sel_hi:[1,0,1]
	v_pk_fma_f32 v[30:31], v[22:23], v[28:29], v[20:21]
	v_pk_fma_f32 v[8:9], v[8:9], s[0:1], v[16:17] op_sel_hi:[1,0,1]
	v_pk_add_f32 v[32:33], v[12:13], v[30:31] neg_lo:[0,1] neg_hi:[0,1]
	v_cmp_neq_f32_e32 vcc, s3, v2
	v_pk_add_f32 v[26:27], v[12:13], v[32:33] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[26:27], v[26:27], v[30:31] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[10:11], v[10:11], v[26:27]
	v_pk_fma_f32 v[26:27], v[22:23], v[28:29], v[30:31] neg_lo:[1,0,0] neg_hi:[1,0,0]
	s_nop 0
	v_pk_add_f32 v[20:21], v[26:27], v[20:21] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[10:11], v[20:21], v[10:11]
	s_nop 0
	v_pk_add_f32 v[20:21], v[32:33], v[10:11]
	s_nop 0
	v_pk_mul_f32 v[26:27], v[24:25], v[20:21]
	v_pk_add_f32 v[32:33], v[32:33], v[20:21] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_mul_f32 v[30:31], v[22:23], v[26:27]
	v_pk_fma_f32 v[28:29], v[12:13], v[24:25], v[26:27]
	v_pk_fma_f32 v[30:31], v[26:27], v[22:23], v[30:31] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_fma_f32 v[12:13], v[12:13], v[24:25], v[28:29] neg_lo:[1,0,0] neg_hi:[1,0,0]
	v_pk_fma_f32 v[18:19], v[26:27], v[18:19], v[30:31]
	v_pk_fma_f32 v[12:13], v[24:25], v[20:21], v[12:13] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_pk_fma_f32 v[30:31], v[22:23], v[26:27], v[18:19]
	v_pk_add_f32 v[10:11], v[10:11], v[32:33]
	v_pk_add_f32 v[34:35], v[20:21], v[30:31] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v33, v9
	v_pk_add_f32 v[20:21], v[20:21], v[34:35] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[20:21], v[20:21], v[30:31] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[10:11], v[10:11], v[20:21]
	v_pk_fma_f32 v[20:21], v[22:23], v[26:27], v[30:31] neg_lo:[1,0,0] neg_hi:[1,0,0]
	v_mov_b32_e32 v22, v16
	v_pk_add_f32 v[18:19], v[20:21], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[10:11], v[18:19], v[10:11]
	s_nop 0
	v_pk_add_f32 v[10:11], v[34:35], v[10:11]
	s_nop 0
	v_pk_fma_f32 v[10:11], v[24:25], v[10:11], v[12:13]
	v_mov_b32_e32 v25, v17
	v_pk_add_f32 v[12:13], v[28:29], v[10:11]
	s_nop 0
	v_pk_mul_f32 v[20:21], v[12:13], v[12:13]
	v_pk_add_f32 v[18:19], v[12:13], v[28:29] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_fma_f32 v[6:7], v[20:21], s[6:7], v[6:7] op_sel_hi:[1,0,0]
	v_pk_add_f32 v[10:11], v[10:11], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_ldexp_f32 v18, v12, 1
	v_pk_fma_f32 v[6:7], v[20:21], v[6:7], s[8:9] op_sel_hi:[1,1,0]
	v_ldexp_f32 v19, v13, 1
	v_pk_mul_f32 v[12:13], v[12:13], v[20:21]
	v_ldexp_f32 v23, v11, 1
	v_pk_fma_f32 v[20:21], v[12:13], v[6:7], v[18:19]
	v_ldexp_f32 v10, v10, 1
	v_pk_add_f32 v[18:19], v[20:21], v[18:19] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v11, v23
	v_pk_fma_f32 v[6:7], v[12:13], v[6:7], v[18:19] neg_lo:[0,0,1] neg_hi:[0,0,1]
	v_mov_b32_e32 v12, v14
	v_pk_add_f32 v[18:19], v[10:11], v[6:7]
	v_mov_b32_e32 v13, v7
	v_mov_b32_e32 v11, v19
	v_mov_b32_e32 v7, v21
	v_pk_add_f32 v[6:7], v[10:11], v[6:7]
	v_pk_add_f32 v[10:11], v[20:21], v[18:19]
	v_pk_add_f32 v[12:13], v[12:13], v[22:23]
	v_mov_b32_e32 v22, v8
	v_mov_b32_e32 v23, v15
	v_mov_b32_e32 v24, v10
	v_mov_b32_e32 v28, v8
	v_mov_b32_e32 v29, v21
	v_mov_b32_e32 v30, v10
	v_mov_b32_e32 v31, v19
	v_pk_add_f32 v[26:27], v[22:23], v[24:25]
	v_pk_add_f32 v[28:29], v[28:29], v[30:31]
	v_pk_add_f32 v[30:31], v[8:9], v[10:11]
	v_pk_add_f32 v[22:23], v[26:27], v[22:23] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v26, v10
	v_mov_b32_e32 v27, v31
	v_mov_b32_e32 v32, v20
	v_pk_add_f32 v[26:27], v[26:27], v[32:33] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v32, v8
	v_mov_b32_e32 v33, v31
	v_mov_b32_e32 v15, v27
	v_pk_add_f32 v[14:15], v[32:33], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[24:25], v[24:25], v[22:23] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v32, v14
	v_mov_b32_e32 v33, v23
	v_mov_b32_e32 v23, v21
	v_pk_add_f32 v[32:33], v[16:17], v[32:33] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[22:23], v[28:29], v[22:23] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v17, v9
	v_pk_add_f32 v[12:13], v[12:13], v[22:23] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[8:9], v[16:17], v[14:15] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[6:7], v[6:7], v[26:27] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[16:17], v[24:25], v[12:13]
	v_pk_add_f32 v[14:15], v[6:7], v[8:9]
	v_mov_b32_e32 v7, v13
	v_pk_add_f32 v[6:7], v[32:33], v[6:7]
	v_mov_b32_e32 v9, v25
	v_pk_add_f32 v[10:11], v[10:11], v[20:21] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[6:7], v[6:7], v[8:9] neg_lo:[0,1] neg_hi:[0,1]
	v_mov_b32_e32 v12, v14
	v_mov_b32_e32 v13, v17
	v_pk_add_f32 v[10:11], v[18:19], v[10:11] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[12:13], v[12:13], v[6:7] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[6:7], v[10:11], v[6:7] neg_lo:[0,1] neg_hi:[0,1]
	v_pk_add_f32 v[8:9], v[8:9], v[12:13] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[6:7], v[6:7], v[8:9]
	v_pk_add_f32 v[8:9], v[16:17], v[14:15]
	s_nop 0
	v_pk_add_f32 v[10:11], v[30:31], v[8:9]
	s_nop 0
	v_pk_add_f32 v[12:13], v[10:11], v[30:31] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[8:9], v[8:9], v[12:13] neg_lo:[0,1] neg_hi:[0,1]
	s_nop 0
	v_pk_add_f32 v[6:7], v[6:7], v[8:9]
	s_nop 0
	v_pk_add_f32 v[6:7], v[10:11], v[6:7]
	s_nop 0
	v_cndmask_b32_e32 v6, v36, v6, vcc
	v_cmp_neq_f32_e32 vcc, s3, v3
	s_nop 1
	v_cndmask_b32_e32 v7, v36, v7, vcc
	v_cmp_ngt_f32_e32 vcc, -1.0, v3
	s_nop 1
	v_cndmask_b32_e32 v7, v37, v7, vcc
	v_cmp_ngt_f32_e32 vcc, -1.0, v2
	s_nop 1
	v_cndmask_b32_e32 v6, v37, v6, vcc
	v_cmp_neq_f32_e32 vcc, -1.0, v2
	s_nop 1
	v_cndmask_b32_e32 v6, v38, v6, vcc
	v_cmp_neq_f32_e32 vcc, -1.0, v3
	s_nop 1
	v_cndmask_b32_e32 v7, v38, v7, vcc
	v_cmp_lt_f32_e64 vcc, |v3|, s4
	s_nop 1
	v_cndmask_b32_e32 v3, v7, v3, vcc
	v_cmp_lt_f32_e64 vcc, |v2|, s4
	s_nop 1
	v_cndmask_b32_e32 v2, v6, v2, vcc
	global_store_dwordx4 v[4:5], v[0:3], off
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
		.amdhsa_next_free_vgpr 44
		.amdhsa_next_free_sgpr 13
		.amdhsa_accum_offset 44
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
    .vgpr_count:     44
    .vgpr_spill_count: 0
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx950
amdhsa.version:
  - 1
  - 2
...
	.end_amdgpu_metadata
