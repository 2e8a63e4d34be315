"""One scale per tensor: casts, amaxes, their forms for many tensors at once, the GEMM.

reference   the specification, in plain torch
checks      what arguments are refused
parts       the tiles whose amaxes a cast leaves
ops         the registered operations
kernels     what runs on devices with FP8 instructions, in Triton for the most part
"""
