"""FP8 number formats: the dtypes, their largest values, and the alignment that FP8 GEMMs ask for."""

import math

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

#: Largest finite value of each FP8 dtype.
FP8_MAX: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}

#: dtypes that can be quantized. float64 is refused: an FP8 result would hide what float64 was asked for.
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: SM90 tensor cores take FP8 operands whose rows are multiples of 16 bytes.
GEMM_ALIGNMENT = 16

#: Side of a block in blockwise scaling.
BLOCK = 128

FLOAT32_MAX = torch.finfo(torch.float32).max


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of an FP8 dtype; raises ValueError for any other dtype."""
    try:
        return FP8_MAX[dtype]
    except KeyError:
        names = ", ".join(str(d) for d in FP8_MAX)
        raise ValueError(f"{dtype} is not an FP8 dtype that GEMMs accept; use one of {names}") from None


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` at or above `size` (an int or a SymInt)."""
    return (size + multiple - 1) // multiple * multiple


def pad_to_alignment(size: int) -> int:
    """`size` rounded up to what an FP8 GEMM accepts along K and N."""
    return round_up(size, GEMM_ALIGNMENT)


def largest_finite(dtype: torch.dtype) -> float:
    """Largest finite value of a floating dtype, as a Python float that float32 can hold."""
    return min(math.inf, torch.finfo(dtype).max)
