"""The arguments of a grouped GEMM, and the options of a cast of columns, as one value."""

from __future__ import annotations

import dataclasses

import torch

from lowering import hardware
from lowering.formats import Granularity


@dataclasses.dataclass(frozen=True)
class GroupedGemm:
    """The arguments of `reference.scaled_grouped_mm`, by their names."""

    a: torch.Tensor
    b: torch.Tensor
    scale_inv_a: torch.Tensor
    scale_inv_b: torch.Tensor
    offs: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    granularity_a: str = "tensor_wise"
    granularity_b: str = "tensor_wise"
    out_dtype: torch.dtype = torch.bfloat16
    fast_accum: bool = False

    @property
    def granularities(self) -> tuple[Granularity, Granularity]:
        """Those of a and b."""
        return Granularity(self.granularity_a), Granularity(self.granularity_b)

    @property
    def num_groups(self) -> int:
        """As many as there are ends, or matrices in the batches."""
        return self.b.shape[0] if self.offs is None else self.offs.shape[0]

    @property
    def has_rows(self) -> bool:
        """Whether rows are in groups (2D x 3D)."""
        return self.a.dim() == 2 and self.b.dim() == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result."""
        (*_, m, _), n = self.a.shape, self.b.shape[-1]
        return (m, n) if self.has_rows else (self.num_groups, m, n)

    @property
    def gemm(self) -> hardware.Gemm:
        """What the hardware is asked for; a bias is the kernel's own."""
        return hardware.Gemm(self.a.dtype, self.b.dtype, *self.granularities, self.out_dtype, is_grouped=True)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The options of the cast of columns."""

    granularity: str
    pad_outer: bool = False
    power_of_2: bool = True
    epsilon: float = 0.0
