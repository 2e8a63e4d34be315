"""The scales of blocks of 128 as those of MXFP8: both operands of a GEMM in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.formats import BLOCK
from lowering.mxfp8 import reference
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device
from lowering.triton.tile import tiles_of

#: Tiles of scales, along inner, that a program writes.
TILES = 8


@triton.jit
def turn(s, codes, pid, tiles_inner, stored, stride, SQUARE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """TILES tiles of `reference.e8m0_scales` of one operand. s: float32 bits, rows of `stored` elements. codes: int32, the four
    equal codes of a line in each."""
    programs = tiles_of(tiles_inner, TILES)
    outer = pid // programs
    tiles = (pid % programs) * TILES + tl.arange(0, TILES)
    is_tile = tiles < tiles_inner
    word = tl.arange(0, BLOCK)  # of a tile: [line % 32, line // 32]
    if SQUARE:
        bits = tl.load(s + outer * stride + tiles, mask=is_tile, other=0)[:, None]
    else:
        line = outer * BLOCK + (word % 4) * 32 + word // 4
        mask = is_tile[:, None] & (line < stored)[None, :]
        bits = tl.load(s + tiles[:, None] * stride + line[None, :], mask=mask, other=0)
    code = (bits >> 23) & 0xFF
    four = tl.broadcast_to(code | (code << 8) | (code << 16) | (code << 24), (TILES, BLOCK))
    places = (outer * tiles_inner + tiles)[:, None] * BLOCK + word[None, :]
    tl.store(codes + places, four, mask=tl.broadcast_to(is_tile[:, None], (TILES, BLOCK)))


@Kernel
@triton.jit
def e8m0_scales_kernel(
    s_a, codes_a, stored_a, stride_a, programs_a, s_b, codes_b, stored_b, stride_b, tiles_inner,
    SQUARE_A: tl.constexpr, SQUARE_B: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`turn` of a in the first programs_a programs, of b in the rest."""
    pid = tl.program_id(0)
    if pid < programs_a:
        turn(s_a, codes_a, pid, tiles_inner, stored_a, stride_a, SQUARE_A, TILES, BLOCK)
    else:
        turn(s_b, codes_b, pid - programs_a, tiles_inner, stored_b, stride_b, SQUARE_B, TILES, BLOCK)


def e8m0_scales(
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    m: int,
    n: int,
    k: int,
    *,
    square_a: bool = False,
    square_b: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.e8m0_scales`."""
    (of_a, programs_a), (of_b, programs_b) = (_new(s, outer, k) for s, outer in ((scale_inv_a, m), (scale_inv_b, n)))
    if programs_a + programs_b:
        with on_device(scale_inv_a):
            e8m0_scales_kernel[(programs_a + programs_b,)](
                *_arguments(scale_inv_a, of_a), programs_a, *_arguments(scale_inv_b, of_b), cdiv(k, BLOCK),
                SQUARE_A=square_a, SQUARE_B=square_b, TILES=TILES, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return of_a, of_b


def _new(scale_inv: torch.Tensor, outer: int, inner: int) -> tuple[torch.Tensor, int]:
    """Codes to be filled, and how many programs do so."""
    rows, cols, *tile = reference.gemm_ready_scale_shape(outer, inner)
    return scale_inv.new_empty((rows, cols, *tile), dtype=torch.uint8), rows * cdiv(cols, TILES)


def _arguments(scale_inv: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return scale_inv.view(torch.int32), codes.view(torch.int32), scale_inv.shape[1], scale_inv.stride(0)
