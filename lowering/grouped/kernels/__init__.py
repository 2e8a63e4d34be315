"""Triton kernels of grouped GEMMs and of columnwise copies.

gemm     a GEMM per group, in one launch
columns  columnwise copies of rows in groups
"""
