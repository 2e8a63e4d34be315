"""The arguments of a blockwise GEMM as one value, for what chooses among its implementations and for these."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lowering.formats import Granularity


@dataclasses.dataclass(frozen=True)
class BlockwiseGemm:
    """The arguments of `reference.scaled_mm_blockwise`, by their names."""

    a: torch.Tensor
    b: torch.Tensor
    scale_inv_a: torch.Tensor
    scale_inv_b: torch.Tensor
    bias: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    granularity_a: str
    granularity_b: str
    out_dtype: torch.dtype = torch.bfloat16

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.shape[0], self.b.shape[1], self.a.shape[1]

    @property
    def granularities(self) -> tuple[Granularity, Granularity]:
        """Those of a and b."""
        return Granularity(self.granularity_a), Granularity(self.granularity_b)

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """None without a bias."""
        return None if self.bias is None else self.bias.dtype

    def on(self, device: torch.device) -> BlockwiseGemm:
        """The same on a device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(self, **tensors)
