"""The state of delayed scaling: amax histories and scales of all quantized tensors of a compiled model.

`store.py`       the tensors, their names and their slots
`reduction.py`   the reduction of staged amaxes over ranks
`update.py`      the step boundary: one fused update
`checkpoint.py`  to plain tensors and back
"""
