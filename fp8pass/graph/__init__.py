"""What can be read off a graph.

`values.py`  matrix values: what a GEMM operand really is
`origin.py`  where a node comes from in the user's model
`sites.py`   GEMM sites, and the names of the tensors they read
"""
