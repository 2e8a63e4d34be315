"""Triton kernels of the blockwise operations. The modules import Triton; this package does not.

casts        cast_blockwise: which kernels make the copies
cast         one matrix, or one batch
multi_cast   many matrices, one launch
gemm         scaled_mm_blockwise
"""
