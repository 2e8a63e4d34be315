"""What runs on CUDA devices with FP8 instructions and is of no room. The modules import Triton; this package does not.

checksums   checksums, of many tensors
statistics  quantization_statistics, of what is in memory
"""
