"""One scale per tensor: casts, amaxes, their forms for many tensors at once, the GEMM."""
