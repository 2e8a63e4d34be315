"""Triton kernels of grouped GEMMs and of columnwise copies.

gemm     a GEMM per group, in one launch
columns  columnwise copies of rows in groups
rows     rows in groups at padded offsets, for libraries whose tiles hold rows of one group, and back
"""
