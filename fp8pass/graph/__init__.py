"""Facts that are read off a graph, and nodes that are made in it.

`origin.py`   where a node comes from in the user's model
`names.py`    names of quantized tensors
`traces.py`   graphs that somebody else traced: what is a gradient in them
`values.py`   matrix values: what a GEMM operand really is
`kinds.py`    what a GEMM is: the operations that multiply matrices
`sites.py`    GEMM sites, and the names of the tensors they read
`cursor.py`   nodes inserted with a fake value and their metadata
`casts.py`    the operations that quantize, as one typed view
`calls.py`    calls of operations by the names of their arguments
`scales.py`   which scale a node holds
`moves.py`    ops that put elements elsewhere and leave them as they are
`gathers.py`  all-gathers, and how other data travels the same way
`activations.py` SiLU, and the sigmoid that its gradient computes
`snapshot.py` what a graph was, to look at later
`permutations.py` rows put at the places that a permutation says
"""
