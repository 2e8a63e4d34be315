"""Grouped GEMMs, one per expert in one launch, and the columnwise copies of rows in groups.

arguments       the arguments of a GEMM, the options of a cast, as one value
layouts         where groups lie in a copy that is contiguous along tokens, shapes of scales
reference       the specification of the GEMM and of columnwise copies, in plain torch
checks          what arguments are refused
ops             the registered operations
gemm            who computes a GEMM
trial           what a library's GEMM is tried on
cutlass         GEMMs by torch's CUTLASS kernel, after a trial
deep_gemm       GEMMs with scales per block by DeepGEMM, after a trial
kernels         Triton kernels
"""
