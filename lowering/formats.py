"""FP8 number formats: the dtypes, their largest values, what shares a scale, the alignment that GEMMs ask for, and the PTX
that converts to FP8, in our kernels and in those that Inductor generates.

NOTE [one piece of PTX] Four float32 values become one word of four bytes, and nothing else reads its halves. ptxas before 13.0
fuses the two conversions that fill a word. Where a half is also used alone, as Triton's own conversion uses it if the bytes go
to two layouts, it then takes that half out of a register that nothing has written (docs/gpu-status.md). One piece takes fewer
instructions and registers, too. On compute capability 8.9 it also rounds once, where Triton's own conversion goes through
float16, towards zero.

Source: PTX ISA 8.7, `cvt`: .e4m3x2 and .e5m2x2 from .f32 need .rn and .satfinite and sm_89. Of `cvt d, a, b` a fills the upper
byte of d. NaN becomes 0x7F, whatever its sign; all else that is too large, infinities included, the largest finite value.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

#: Largest finite value of each FP8 dtype.
FP8_MAX: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}

#: dtypes that can be quantized. float64 is refused: an FP8 result would hide what float64 was asked for.
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: SM90 tensor cores take FP8 operands whose rows are multiples of 16 bytes.
GEMM_ALIGNMENT = 16

#: float32 scales of a row in 16 bytes: rows of a scale per block are so long, and scales per line begin at multiples of it.
SCALE_ALIGNMENT = 4

#: Side of a block in blockwise scaling.
BLOCK = 128

#: Length of a block in MXFP8.
MX_BLOCK = 32


class Granularity(enum.StrEnum):
    """The elements of an operand that share a scale. Names are those of `torch.nn.functional.ScalingType`.

    An operand is a matrix [outer, inner] whose inner dimension the GEMM contracts. Graphs hold the value, a plain str.
    """

    TENSOR_WISE = "tensor_wise"
    """One scale for all."""
    ROW_WISE = "row_wise"
    """One scale for each of the outer rows."""
    BLOCK_1X32 = "block_1x32"
    """One scale for 32 neighbours of a row."""
    BLOCK_1X128 = "block_1x128"
    """One scale for 128 neighbours of a row."""
    BLOCK_128X128 = "block_128x128"
    """One scale for a square of 128 rows and 128 columns."""

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a block; None where the scale belongs to a whole row or to the whole tensor."""
        return _BLOCKS.get(self)

    @property
    def label(self) -> str:
        """Short words for messages: "1x128", "row-wise"."""
        return self.value.removeprefix("block_").replace("_", "-")

    @property
    def is_square(self) -> bool:
        """True if one grid of blocks serves a matrix and its transpose."""
        return self is Granularity.BLOCK_128X128

    @classmethod
    def finest(cls, granularities: Iterable[Granularity]) -> Granularity:
        """The one with the fewest elements per scale, of the two that meet in a GEMM."""
        return min(granularities, key=_FINEST_FIRST.index)

    @classmethod
    def of_block(cls, block: Sequence[int]) -> Granularity:
        """The granularity of blocks of these rows and columns; raises ValueError where there is none."""
        for granularity, shape in _BLOCKS.items():
            if shape == tuple(block):
                return granularity
        known = ", ".join(str(shape) for shape in _BLOCKS.values())
        raise ValueError(f"no granularity has blocks of {tuple(block)}; use one of {known}")


_BLOCKS = {
    Granularity.BLOCK_1X32: (1, MX_BLOCK),
    Granularity.BLOCK_1X128: (1, BLOCK),
    Granularity.BLOCK_128X128: (BLOCK, BLOCK),
}

_FINEST_FIRST = (
    Granularity.BLOCK_1X32,
    Granularity.BLOCK_1X128,
    Granularity.BLOCK_128X128,
    Granularity.ROW_WISE,
    Granularity.TENSOR_WISE,
)

FLOAT32_MAX = torch.finfo(torch.float32).max


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of an FP8 dtype; raises ValueError for any other dtype."""
    try:
        return FP8_MAX[dtype]
    except KeyError:
        names = ", ".join(str(d) for d in FP8_MAX)
        raise ValueError(f"{dtype} is not an FP8 dtype that GEMMs accept; use one of {names}") from None


def largest_rounded(dtype: torch.dtype) -> float:
    """Largest float32 that rounds to `fp8_max(dtype)`, to nearest even: half a step above it."""
    return fp8_max(dtype) * (29 / 28 if dtype == E4M3 else 15 / 14)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` at or above `size` (an int or a SymInt)."""
    return (size + multiple - 1) // multiple * multiple


def pad_to_alignment(size: int) -> int:
    """`size` rounded up to what an FP8 GEMM accepts along K and N."""
    return round_up(size, GEMM_ALIGNMENT)


def largest_finite(dtype: torch.dtype) -> float:
    """Largest finite value of a floating dtype, as a Python float that float32 can hold."""
    return torch.finfo(dtype).max


FORMAT_NAMES = {E4M3: "e4m3", E5M2: "e5m2"}

#: The constraints of `tl.inline_asm_elementwise`: four float32 operands, one word.
CONSTRAINTS = "=r,r,r,r,r"
#: Elements that one piece converts.
PACK = 4


def ptx_to_fp8(dtype: torch.dtype) -> str:
    """Four float32 values $1 to $4 as the bytes of the word $0, the first in its lowest byte."""
    cvt = f"cvt.rn.satfinite.{FORMAT_NAMES[dtype]}x2.f32"
    return f"{{ .reg .b16 lo, hi; {cvt} lo, $2, $1; {cvt} hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"
