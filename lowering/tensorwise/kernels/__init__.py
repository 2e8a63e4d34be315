"""What runs on CUDA devices with FP8 instructions. The modules import Triton; this package does not.

amax                   amax
cast                   quantize, cast, cast_amax, cast_partial_amax
cast_transpose         cast_transpose, cast_transpose_amax, cast_transpose_partial_amax
multi_amax             multi_amax, record_partial_amax: many tensors, one launch
multi_cast_transpose   multi_cast_transpose_amax: many matrices, one launch
transposed_copy        transposed_copy: one more copy of bytes that are there
gemm                   scaled_mm: torch's, with its conditions met

Each function computes what the function of its name in the reference says, bit for bit except for the sign of NaN; the
GEMM, but for the order of its sums.
"""
