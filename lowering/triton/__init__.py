"""What the Triton kernels of all rooms share.

ahead    kernels compiled in threads, before their first launch
launch   device guard, strided tensors seen as matrices, tables for the device
tile     device functions: magnitudes as ordered integers, the saturating FP8 cast; imports Triton
"""
