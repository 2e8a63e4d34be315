"""One scale per 1x128 or 128x128 block: casts, formats for gathering, the GEMM.

reference   the specification, in plain torch; what the layouts of scales are
checks      what arguments are refused
ops         the registered operations
arguments   the arguments of a GEMM as one value
gemm        who computes a GEMM
cublaslt    GEMMs by cuBLASLt, after a trial
deep_gemm   GEMMs by DeepGEMM where it is installed, after a trial
trial       small GEMMs of every kind, held against the reference
kernels     Triton kernels
"""
