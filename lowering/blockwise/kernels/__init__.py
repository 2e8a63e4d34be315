"""Triton kernels of the blockwise operations. The modules import Triton; this package does not.

cast   quantize_blockwise, cast_blockwise, cast_transpose_blockwise, compact_blockwise
gemm   scaled_mm_blockwise
"""
