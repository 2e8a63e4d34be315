"""The state of delayed scaling: scales loaded, amaxes recorded, the step boundary.

reference   the specification, in plain torch
checks      what arguments are refused
ops         the registered operations
cpu         the step boundary on the CPU
kernels     Triton kernels
"""
