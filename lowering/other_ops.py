"""Operations that quantize nothing: checksums of tensors, the bytes of several as one tensor, a cheaper logistic function.

NOTE [checksums] The bytes of a tensor, in the order in which they are in memory if there are no gaps between its elements, else
row-major, are padded with zeros to 32-bit words w[0], w[1], ... (little-endian). The checksum is the sum of mixed(w[i], i)
modulo 2**32, with all arithmetic modulo 2**32:

    h = (w ^ (i * 0x9E3779B9)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    mixed = h ^ (h >> 16)

For each i that is a bijection of w: a change within one word is always seen. Any other, such as words that change places, is
missed with a probability of 2**-32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.copies import without_gaps
from lowering.hardware import runs_kernels
from lowering.operation import operation


@operation
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise. Inductor's code on GPUs computes it of float32 in 5 instructions
    (`inductor.elementwise.sigmoid`). It takes the place of aten's in compiled graphs alone, of SiLU and its gradient above all,
    that casts join; a rewritten graph shows aten's."""
    return torch.sigmoid(x)


@sigmoid.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operation
def packed(parts: list[Tensor]) -> Tensor:
    """The bytes of tensors one after another, each row-major, so that they travel together: uint8 [bytes]. A graph gives it all
    results of one operation at once: the way from an input to an all-gather is then one chain, which passes that look for
    gathers of Parameters follow."""
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


@packed.fake
def _(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty((sum(part.numel() * part.element_size() for part in parts),), dtype=torch.uint8)


#: Odd factors, whose products modulo 2**32 lose nothing: of the position, and of the two rounds.
OF_POSITION, OF_FIRST, OF_SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
SHIFTS = (13, 16)
WORD = 4
#: Words that are mixed at once on the CPU: a few MB of each intermediate result.
_CHUNK = 1 << 18


def words_of(x: Tensor) -> Tensor:
    """The bytes of a tensor as int32 words, [n]: a view where its memory allows it."""
    flat = without_gaps(x)
    if not flat.numel():
        return torch.empty(0, dtype=torch.int32, device=x.device)
    data = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    if data.numel() % WORD:
        data = torch.nn.functional.pad(data, (0, -data.numel() % WORD))
    if data.storage_offset() % WORD or data.data_ptr() % WORD:
        data = data.clone()
    return data.view(torch.int32)


def _signed(value: int) -> int:
    """A word as the int32 that has its bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(h: Tensor, by: int) -> Tensor:
    """h >> by, of words without sign."""
    return (h >> by) & ((1 << (32 - by)) - 1)


def _sum_of(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = _CHUNK if words.device.type == "cpu" else max(words.numel(), 1)
    for first in range(0, words.numel(), step):
        some = words[first : first + step]
        position = torch.arange(first, first + some.numel(), dtype=torch.int32, device=words.device)
        h = (some ^ (position * _signed(OF_POSITION))) * _signed(OF_FIRST)
        h = (h ^ _shifted(h, SHIFTS[0])) * _signed(OF_SECOND)
        total += (h ^ _shifted(h, SHIFTS[1])).sum(dtype=torch.int64)
    return total


@operation
def checksums(xs: list[Tensor]) -> Tensor:
    """The checksum of the bytes of each tensor, see NOTE [checksums]: int32 [n]; 0 of one without elements. Takes every dtype,
    and any strides."""
    sums = torch.stack([_sum_of(words_of(x)) for x in xs]) & 0xFFFFFFFF
    return torch.where(sums >= 1 << 31, sums - (1 << 32), sums).to(torch.int32)


@checksums.fake
def _(xs: list[Tensor]) -> Tensor:
    return xs[0].new_empty((len(xs),), dtype=torch.int32)


checksums.lazy_provider(runs_kernels, "lowering.kernels")
