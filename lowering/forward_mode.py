"""Forward-mode differentiation, which no operation of this package has: a tangent is refused, not dropped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad


def has_tangent(values: Iterable[object]) -> bool:
    """Whether a tensor among the values, or in lists of them, carries the tangent of a level of `torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    for value in values:
        if isinstance(value, (list, tuple)):
            found = has_tangent(value)
        else:
            found = isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None
        if found:
            return True
    return False
