"""Kernels of no room, for CUDA devices with FP8 instructions. The modules import Triton; this package does not."""
