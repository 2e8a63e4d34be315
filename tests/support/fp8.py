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


# -- tensors


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of the elements, as integers."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if shapes, dtypes and bits are equal."""
    return actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))


def every_bfloat16() -> torch.Tensor:
    """NaN, both infinities, both zeros and subnormals among them."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def wide_range(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers of many binades."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return values.to(dtype)


def rows_of_range(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Rows of very different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * magnitudes).to(dtype)
