"""What runs on CUDA devices with FP8 instructions and is of no room. The modules import Triton; this package does not.

statistics  quantization_statistics, of what is in memory
"""
