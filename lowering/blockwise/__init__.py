"""One scale per 1x128 or 128x128 block: casts, formats for gathering, the GEMM.

reference   the specification, in plain torch; what the layouts of scales are
checks      what arguments are refused
ops         the registered operations
arguments   the arguments of a GEMM as one value
gemm        who computes a GEMM
cublaslt    GEMMs by cuBLASLt, after a trial
kernels     Triton kernels
"""
