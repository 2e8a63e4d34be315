"""The arguments of a blockwise GEMM as one value, for what chooses among its implementations and for these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lowering.formats import Granularity
from lowering.products import Product

Compute = Callable[..., torch.Tensor]
"""a, b, their scales and the bias or None -> the product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseGemm(Product):
    """The arguments of `reference.scaled_mm_blockwise`, by their names."""

    granularity_a: str
    granularity_b: str

    @property
    def granularities(self) -> tuple[Granularity, Granularity]:
        """Those of a and b."""
        return Granularity(self.granularity_a), Granularity(self.granularity_b)

    def on(self, device: torch.device) -> BlockwiseGemm:
        """The same on a device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(self, **tensors)
