"""What the Triton kernels of all rooms share.

amaxes     the largest magnitudes of many tensors, by one launch
ahead      kernels compiled in threads, before their first launch
assembler  which ptxas assembles our kernels
check      `python -m lowering.triton.check`: which ptxas is used, and whether it is right
epilogue   scales, a bias and one rounding behind a GEMM without such an epilogue; imports Triton
many       launches over many matrices: what shares one, and its table
launch     device guard, strided tensors seen as matrices, tables for the device
limits     what a GPU lets a program have, and tiles of GEMMs that fit
scales     device functions: scales of blocks and lines
tile       device functions: magnitudes as ordered integers, the saturating FP8 cast; imports Triton
trial      casts, compared with the reference when a variant is first launched
"""
