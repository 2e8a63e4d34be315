"""Triton kernels of the operations on the state. The modules import Triton; this package does not.

record          load_scales, and what records amaxes
update_scales   update_scales
"""
