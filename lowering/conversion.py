"""The PTX that converts to FP8, in our kernels and in those that Inductor generates.

NOTE [one piece of PTX] Four float32 values become one word of four bytes, and nothing else reads its halves. ptxas before 13.0
fuses the two conversions that fill a word. Where a half is also used alone, as Triton's own conversion uses it if the bytes go
to two layouts, it then takes that half out of a register that nothing has written (docs/assemblers.md). One piece takes fewer
instructions and registers, too. On compute capability 8.9 it also rounds once, where Triton's own conversion goes through
float16, towards zero.

Source: PTX ISA 8.7, `cvt`: .e4m3x2 and .e5m2x2 from .f32 need .rn and .satfinite and sm_89. Of `cvt d, a, b` a fills the upper
byte of d. NaN becomes 0x7F, whatever its sign; all else that is too large, infinities included, the largest finite value.
"""

from __future__ import annotations

import torch

from lowering.formats import E4M3, E5M2

_NAMES = {E4M3: "e4m3", E5M2: "e5m2"}

#: Of `tl.inline_asm_elementwise`: four float32 operands, one word.
CONSTRAINTS = "=r,r,r,r,r"
#: Elements that one piece converts.
PACK = 4


def ptx_to_fp8(dtype: torch.dtype) -> str:
    """Four float32 values $1 to $4 as the bytes of the word $0, the first in its lowest byte."""
    cvt = f"cvt.rn.satfinite.{_NAMES[dtype]}x2.f32"
    return f"{{ .reg .b16 lo, hi; {cvt} lo, $2, $1; {cvt} hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"
