"""What runs on CUDA devices with FP8 instructions. The modules import Triton; this package does not.

amax                   amax
casts                  cast: which kernels make the copies
cast                   quantize; one copy of a matrix or batch
cast_transpose         both copies of a matrix or batch
multi_cast_transpose   many matrices, one launch
multi_amax             multi_amax, multi_scales: many tensors, one launch
transposed_copy        transposed_copy: one more copy of bytes that are there

Each function computes what the function of its name in the reference says, bit for bit except for the sign of NaN.
"""
