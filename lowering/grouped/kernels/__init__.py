"""Triton kernels of the grouped operations. The modules import Triton; this package does not."""
