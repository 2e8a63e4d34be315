"""Triton kernels of grouped GEMMs and of the casts that make their operands.

gemm     a GEMM per group, in one launch
"""
