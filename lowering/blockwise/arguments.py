"""The arguments of a blockwise GEMM as one value, for what chooses among its implementations and for these."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowering.formats import Granularity
from lowering.products import Product

#: Of what libraries read.
ALIGNMENT_BYTES = 16


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins where libraries can read it. A tensor without memory, as in tracing, begins as its view of it does."""
    offset = x.storage_offset() * x.element_size()
    return (offset if isinstance(x, FakeTensor) else x.data_ptr()) % ALIGNMENT_BYTES == 0


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
