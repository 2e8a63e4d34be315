"""One scale per row of a, one per column of b: along K of each copy.

reference   the specification, in plain torch
checks      what arguments are refused
ops         the registered operations
kernels     what runs on devices with FP8 instructions, in Triton for the most part
"""
