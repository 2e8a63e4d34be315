"""One scale per 1x128 or 128x128 block: casts, formats for gathering, the GEMM.

reference   the specification, in plain torch; what the layouts of scales are
checks      what arguments are refused
ops         the registered operations
gemm        who computes a GEMM
cublaslt    GEMMs by cuBLASLt, after a trial
mxfp8       GEMMs through MXFP8, on SM100
kernels     Triton kernels
"""
