"""Triton kernels of grouped GEMMs and of the casts that make their operands.

gemm         a GEMM per group, in one launch
stacks       casts of a matrix per expert, with a scale per matrix
columns      columnwise copies of rows in groups
line_stacks  the same, with scales per row and per block
"""
