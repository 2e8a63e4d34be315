"""Triton kernels of the blockwise operations. The modules import Triton; this package does not."""
