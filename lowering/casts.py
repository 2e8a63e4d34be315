"""Casts that compute the scales of lines and blocks, and what becomes of copies that travel: the specification, for every kind
of scales. A room has a function for one copy of one tensor, and one for its memory.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from lowering import checks
from lowering.blockwise import reference as blocks
from lowering.copies import CastOptions, copies_of, dense
from lowering.formats import Granularity, fp8_max
from lowering.mxfp8 import reference as mx
from lowering.rowwise import reference as rows

ROOMS: dict[Granularity, ModuleType] = {
    Granularity.ROW_WISE: rows,
    Granularity.BLOCK_1X32: mx,
    Granularity.BLOCK_1X128: blocks,
    Granularity.BLOCK_128X128: blocks,
}


def cast_with_scales(
    xs: list[Tensor],
    dtype: torch.dtype,
    *,
    granularity: str,
    rowwise: bool = True,
    columnwise: bool = False,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
    square: bool = False,
    compact: bool = False,
    inverse: str | None = None,
) -> list[Tensor]:
    """FP8 copies of matrices [R, C] or batches of matrices [E, R, C], each quantized along its own contraction dimension, and
    what multiplies them: scale_inv. Returns the rowwise copies of all, their scale_inv, the columnwise copies of all, their
    scale_inv. Padding is that of lowering/copies.py. Raises ValueError for another granularity, dtype or type.

        row_wise         q [R, C16], [C, R16], the transpose; float32 [outer, 1], of a batch [E, outer, 1], 1 for lines of
                         padding. Each line has the scale of `scale_from_amax` with the amax of its elements
        block_1x128      the same q; float32 1/scale for each 128 of a line (`scaling.quantize_blocks`), GEMM-ready
        block_128x128    one grid of blocks serves both copies
        block_1x32       q [R, C32], [C, R32]; E8M0 codes, uint8, as `lowering.quantize_mxfp8` makes them whatever `power_of_2`
                         and `epsilon`, GEMM-ready; square: one for 32x32 elements, for both copies

    Scales of blocks of a batch are those that grouped GEMMs read, 0 for lines of padding (NOTE [scale layouts] of the rooms).
    compact: for data that travel, by blocks: neither transposed nor padded, copies [R, C], scale_inv [R, ceil(C/block)] and
    [ceil(R/block), C], of square blocks both [ceil(R/block), ceil(C/block)]. Scales: `power_of_2` rounds them down to powers of
    two, amaxes below `epsilon` count as that. inverse: as inference engines quantize (`scaling.scales_from_amax`,
    `scaling.quantize_as`), with power_of_2=False. Sources: torchao's rowwise float8 recipe, docs/numerics.md; of `inverse`
    DeepGEMM's utils/math.py, vLLM's fp8_utils.py, transformers' integrations/compressed_tensors.py."""
    sides = {"rowwise": rowwise, "columnwise": columnwise, "pad_rows": pad_rows, "pad_cols": pad_cols}
    scaling = {"power_of_2": power_of_2, "epsilon": epsilon, "square": square, "inverse": inverse}
    how = CastOptions.of(**sides, **scaling, granularity=granularity, compact=compact)
    copy = ROOMS[Granularity(granularity)].copy
    return copies_of(xs, how, lambda x, *side: copy(x, dtype, how, *side))


def gemm_ready(
    q: Tensor,
    scale_inv: Tensor,
    *,
    granularity: str,
    square: bool = False,
    columnwise: bool = False,
    pad_outer: bool = False,
) -> tuple[Tensor, Tensor]:
    """One compact copy of a matrix and its scales in the GEMM-ready format: what `cast_with_scales` gives, bit for bit."""
    if columnwise:
        q, scale_inv = q.t(), scale_inv.t()
    how = CastOptions.of(granularity=granularity, square=square)
    ready: tuple[Tensor, Tensor] = room_of_blocks(granularity).ready(dense(q), scale_inv, how, pad_outer)
    return ready


def room_of_blocks(granularity: str) -> ModuleType:
    """The room of scales of blocks; raises ValueError for others."""
    checks.check_granularity("granularity", granularity, [kind for kind in ROOMS if kind.block is not None])
    return ROOMS[Granularity(granularity)]


def check_casts(
    xs: list[Tensor],
    dtype: torch.dtype,
    granularity: str,
    rowwise: bool,
    columnwise: bool,
    power_of_2: bool,
    square: bool,
    compact: bool,
    inverse: str | None,
) -> None:
    """Every tensor is a matrix or a batch that can be quantized so, and there is something to do."""
    checks.check_granularity("granularity", granularity, ROOMS)
    kind = Granularity(granularity)
    if kind.block is None:
        fp8_max(dtype)
        checks.check_inputs(xs, rowwise, columnwise)
    else:
        checks.check_blocks_of(xs, dtype, f"in blocks of {kind.label}", rowwise, columnwise, compact)
    checks.check_inverse(inverse, power_of_2)
    is_mx = kind is Granularity.BLOCK_1X32
    for name, is_wrong, value in (("square", square and not is_mx, False), ("inverse", inverse is not None and is_mx, None)):
        if is_wrong:
            raise ValueError(f"{name} does not go with {kind.label} scales; pass {name}={value}")
    if compact and kind.block is None:
        raise ValueError("compact is True, which is for scales of blocks; pass compact=False")


def check_compact(q: Tensor, scale_inv: Tensor, granularity: str, square: bool, columnwise: bool) -> None:
    """`scale_inv` are the compact ones of the copy `q`, with scales of blocks."""
    how = CastOptions.of(granularity=granularity, square=square)
    shape_of = functools.partial(room_of_blocks(granularity).compact_shape, how)
    dtype = torch.uint8 if granularity == Granularity.BLOCK_1X32 else torch.float32
    checks.check_compact(q, scale_inv, columnwise, shape_of, dtype)
