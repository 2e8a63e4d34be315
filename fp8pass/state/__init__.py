"""The state of delayed scaling: amax histories and scales of all quantized tensors of a compiled model.

`store.py`       the tensors, their names and their slots
`update.py`      the step boundary: reduction over ranks, then one fused update
`checkpoint.py`  to plain tensors and back
"""
