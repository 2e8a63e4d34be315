"""Triton kernels of the MXFP8 operations. The modules import Triton; this package does not.

cast   quantize_mxfp8, cast_mxfp8, cast_transpose_mxfp8, compact_mxfp8
"""
