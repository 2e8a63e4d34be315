"""Triton kernels of the operations on the state. The modules import Triton; this package does not.

record          load_scales, record_amax
update_scales   update_scales
"""
