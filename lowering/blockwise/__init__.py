"""One scale per 1x128 or 128x128 block: casts, formats for gathering, the GEMM."""
