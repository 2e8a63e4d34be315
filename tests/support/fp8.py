"""FP8 by the definition of its two formats, in NumPy: values come from bits, the nearest is searched; no cast is asked."""

import numpy as np
import torch

from lowering.formats import E4M3, E5M2


def _values(exponent_bits: int, mantissa_bits: int, largest: int) -> np.ndarray:
    """What each code without a sign stands for, from 0 on, as float64, up to the code of the largest number."""
    codes = np.arange(largest + 1)
    exponent, mantissa = codes >> mantissa_bits, codes % 2**mantissa_bits
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - 2 ** (exponent_bits - 1) + 1)


#: E4M3 has 0x7E = 448 as its largest number and no infinity; of E5M2 0x7B is the last one before infinity.
VALUES = {E4M3: _values(4, 3, 0x7E), E5M2: _values(5, 2, 0x7B)}


def codes_of(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest to each float64, of two the even code; beyond the largest number that number; NaN is 0x7F of any sign."""
    values = VALUES[dtype]
    magnitude = np.minimum(np.nan_to_num(np.abs(x), posinf=values[-1]), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    down, up = magnitude - values[above - 1], values[above] - magnitude
    code = np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)
    return (np.where(np.isnan(x), 0x7F, code) | np.signbit(x) * 0x80).astype(np.uint8)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of these codes, as float64."""
    magnitude = VALUES[dtype][np.minimum(codes_of(x, dtype) & 0x7F, len(VALUES[dtype]) - 1)]
    return np.where(np.isnan(x), np.nan, np.copysign(magnitude, x))
