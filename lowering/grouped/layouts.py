"""Where the groups of a grouped GEMM lie in memory, and the shapes of scales.

NOTE [groups] `offs` [E], int32, holds the cumulative ends of E groups of rows: group g is rows offs[g - 1] to offs[g] of a
matrix of S rows. Rows from offs[-1] on belong to no group and may hold anything: on a GPU they are uninitialized memory.

NOTE [padded offsets] In a columnwise copy tokens are the inner dimension, which the grad_weight GEMM contracts, so every
group starts at a multiple of `alignment`: at the sum of the sizes before it, each rounded up. Between groups there are
zeros. The width of the copy does not depend on the sizes of the groups: S + E * (alignment - 1), rounded up.

NOTE [scales of grouped operands] Scales are compact: in the orientation of their copy, without padding. For a copy
[outer, inner], or a batch of such copies [E, outer, inner]:

    tensor_wise     [] or [E]: one for all, or one for each group
    row_wise        [outer, 1], [E, outer, 1]; the last 1 may be left out. Of a columnwise copy with groups: [E, outer, 1]
    block_1x128     [outer, ceil(inner/128)], [E, outer, ceil(inner/128)], any strides. Casts write them by blocks, strides
                    (.., 1, outer): a tile of the GEMM reads the scales of its lines at once
    block_128x128   [E, ceil(outer/128), ceil(inner/128)]
    block_1x32      uint8 codes [outer, ceil(inner/32)], [E, outer, ceil(inner/32)]
"""

from __future__ import annotations

from lowering.formats import BLOCK, GEMM_ALIGNMENT, MX_BLOCK, Granularity, round_up

_ALIGNMENTS = {
    Granularity.TENSOR_WISE: GEMM_ALIGNMENT,
    Granularity.ROW_WISE: GEMM_ALIGNMENT,
    Granularity.BLOCK_1X32: MX_BLOCK,
    Granularity.BLOCK_1X128: BLOCK,
}


def alignment(granularity: str) -> int:
    """What the groups of a columnwise copy start at multiples of, so that no block of scales holds rows of two groups."""
    return _ALIGNMENTS[Granularity(granularity)]


def padded_width(num_rows: int, num_groups: int, align: int) -> int:
    """Width of a columnwise copy of `num_rows` rows (an int or a SymInt) in groups; see NOTE [padded offsets]."""
    return round_up(num_rows + num_groups * (align - 1), align)


def padded_inner(inner: int, granularity: str) -> int:
    """The stored inner size of a copy: a multiple of what GEMMs of this granularity contract at once."""
    return round_up(inner, MX_BLOCK if granularity == Granularity.BLOCK_1X32 else GEMM_ALIGNMENT)
