"""The state of delayed scaling: amax histories and scales of all quantized tensors of a compiled model.

`store.py`       the tensors of one recipe on one device, their names and their slots
`stores.py`      all stores of a compiled model, and which tensor is in which
`reduction.py`   the reduction of staged amaxes over ranks
`provider.py`    windows of the stores as inputs of graphs
`update.py`      the step boundary: one fused update
`checkpoint.py`  to plain tensors and back
"""
