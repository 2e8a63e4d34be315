"""Schemes: how each kind of scales is computed, applied and sent, as nodes of a graph. No recipe is known by name here.

`copies.py`     FP8 copies, the casts that make them and their sources, as data
`scheme.py`     the interface that every scheme implements, and what it exchanges with the rewrite
`grouped.py`    what schemes share for grouped GEMMs
`turned.py`     one orientation of a copy made of the bytes of the other
`tensorwise.py` one scale per tensor
`delayed.py`    one scale per tensor, from the state
`rowwise.py`    one scale per row
`blocks.py`     what schemes with one scale per block share
`blockwise.py`  one float32 scale per 1x128 or 128x128 values
`mxfp8.py`      one power of two per 1x32 values
`table.py`      the scheme of each quantization
"""
