"""MXFP8: one E8M0 scale, a power of two, per 1x32 block: casts, formats for gathering, the GEMM."""
