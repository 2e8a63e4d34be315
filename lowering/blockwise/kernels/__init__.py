"""Triton kernels of the blockwise operations. The modules import Triton; this package does not.

cast   quantize_blockwise, cast_blockwise, cast_transpose_blockwise, compact_blockwise
multi_cast   multi_cast_blockwise, multi_cast_transpose_blockwise: many matrices, one launch
gemm   scaled_mm_blockwise
"""
