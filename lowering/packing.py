"""Several tensors as the bytes of one, so that they travel together.

A graph gives it all results of one operation at once: what leads from an input to an all-gather is then one chain, which
passes that look for gathers of Parameters follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.operation import operation


@operation
def packed(parts: list[Tensor]) -> Tensor:
    """The bytes of tensors one after another, each row-major: uint8 [bytes]."""
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


@packed.fake
def _(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty((sum(part.numel() * part.element_size() for part in parts),), dtype=torch.uint8)
