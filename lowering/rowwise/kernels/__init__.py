"""What runs on CUDA devices with FP8 instructions. The modules import Triton; this package does not.

passes  the kernels: the amax of every line, then the copies
cast    amax_rowwise, cast_lines_rowwise and cast_rowwise, which is made of them, of one matrix or of many
gemm    scaled_mm_rowwise: torch's, with its conditions met
"""
