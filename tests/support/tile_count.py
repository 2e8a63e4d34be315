"""A kernel of one line, so that a device function of all kernels can be called. Imports Triton."""

import triton
import triton.language as tl

from lowering.triton.tile import tiles_of


@triton.jit
def count(out, size, BLOCK: tl.constexpr):
    """out = the number of tiles."""
    tl.store(out, tiles_of(size, BLOCK))
