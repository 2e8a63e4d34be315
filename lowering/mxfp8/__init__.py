"""MXFP8: one E8M0 scale, a power of two, per 1x32 block: casts, formats for gathering, the GEMM.

reference   the specification, in plain torch; what the layouts of scales are
checks      what arguments are refused
ops         the registered operations
gemm        who computes a GEMM
kernels     Triton kernels
"""
