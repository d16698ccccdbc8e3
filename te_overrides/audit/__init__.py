"""Audit compiled Triton kernels for AMD GPUs without one: do all launch configurations compute the same bits?"""
