"""Triton kernels of the blockwise operations. The modules import Triton; this package does not.

casts        cast_blockwise: which kernels make the copies
cast         one matrix
multi_cast   many matrices, one launch
stacks       stacks of matrices
gemm         scaled_mm_blockwise
"""
