"""Grouped GEMMs, one per expert in one launch, and the casts that make their operands.

layouts         where groups lie in a copy that is contiguous along tokens, shapes of scales
reference       the specification of the GEMM and of columnwise copies, in plain torch
cast_reference  the specification of casts of stacks [E, R, C]
checks          what arguments are refused
ops             the registered operations
gemm            who computes a GEMM
cutlass         GEMMs by torch's CUTLASS kernel, after a trial
kernels         Triton kernels
"""
