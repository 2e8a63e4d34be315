"""Helpers of the checks that compare lowerings with the reference."""

from collections.abc import Iterable

import torch


def bits(x: torch.Tensor) -> torch.Tensor:
    """Its bytes, with one bit pattern for NaN: the sign of a NaN is nobody's concern."""
    nan = x.isnan() if x.dtype == torch.float32 else x.to(torch.float32).isnan()
    whole = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.uint8)
    return torch.where(nan, 127, whole)


def same_bits(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> int:
    """Raise AssertionError unless results are equal, bit for bit. Returns how many there are."""
    pairs = list(zip(found, wanted, strict=True))
    for i, (ours, theirs) in enumerate(pairs):
        assert (ours.shape, ours.dtype, ours.is_contiguous()) == (theirs.shape, theirs.dtype, True), i
        differ = int((bits(ours) != bits(theirs)).sum())
        assert differ == 0, f"{differ} elements of result {i}"
    return len(pairs)
