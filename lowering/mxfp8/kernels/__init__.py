"""Triton kernels of the MXFP8 operations. The modules import Triton; this package does not.

cast     cast_mxfp8
scales   e8m0_scales
"""
