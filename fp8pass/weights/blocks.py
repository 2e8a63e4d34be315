"""One weight that FSDP2 gathers with scales of square blocks: values and scales travel, one copy for both orientations.

Blocks do not cross shards, so a rank's scales are those of the whole weight. After the gather both copies are laid out as GEMMs
read them; FSDP2 frees them with what arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8pass.graph.casts import Layout
from fp8pass.schemes.blocks import BlockScheme, block_of
from fp8pass.schemes.table import scheme_of
from fp8pass.weights.fsdp import Managed
from fp8pass.weights.gathered import Batch, GatheredWeight, Owner, write
from fp8pass.weights.kept import KeptWeight
from fp8pass.weights.keys import WeightKey
from fp8pass.weights.quantizer import Made


class GatheredBlocks(GatheredWeight):
    """A weight with one scale per square block. No scale is decided before a gather."""

    def __init__(self, managed: Managed, weight: KeptWeight, batch: Batch, owner: Owner):
        super().__init__(managed, weight, batch, owner)
        scheme = scheme_of(weight.quantization)
        assert isinstance(scheme, BlockScheme)
        self.scheme = scheme
        self._compact: tuple[torch.Tensor, ...] = ()
        """Values [rows, columns] and scales, one per block: what arrives."""
        self._ready: dict[Layout, list[torch.Tensor]] = {}
        """Data and scales of each copy."""

    @property
    def knows_scale(self) -> bool:
        return True

    @property
    def derived(self) -> list[torch.Tensor]:
        return [tensor for copy in self._ready.values() for tensor in copy]

    def has(self, layouts: Sequence[Layout]) -> bool:
        return self.is_here and set(layouts) <= set(self._ready)

    def part(self, key: WeightKey) -> torch.Tensor:
        assert key.layout is not None
        return self._ready[key.layout][0 if key.part == "data" else 1]

    def quantized(self) -> tuple[tuple[torch.Tensor, ...], Made]:
        managed = self.managed
        data, scales = self.scheme.compact(managed.shard.detach().to(managed.dtype), self.weight.quantization)
        return (data.view(torch.uint8), scales.view(torch.uint8)), Made((data,), (scales,))

    def take(self, made: Made, whole: torch.Tensor) -> None:
        if not self._compact:
            (data,), (scales,) = made.data, made.scale_inv
            arrived, of_blocks = self._arrived
            width = scales.shape[1] * scales.element_size()
            self._compact = (arrived.view(whole.shape).view(data.dtype), of_blocks.view(-1, width).view(scales.dtype))
        self._lay_out()

    def fill(self, whole: torch.Tensor) -> None:
        for target, made in zip(self._compact, self.scheme.compact(whole, self.weight.quantization), strict=True):
            write(target, made)
        self._lay_out()

    def _lay_out(self) -> None:
        data, scales = self._compact
        for layout in self.weight.layouts:
            made = self.scheme.ready(data, scales, self.weight.quantization, layout)
            if layout not in self._ready:
                self._ready[layout] = [torch.empty_like(x) for x in made]
            for target, values in zip(self._ready[layout], made, strict=True):
                write(target, values)

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        data, scales = self._compact
        size = block_of(self.weight.quantization)[0]
        factors = scales if scales.dtype == torch.float32 else scales.view(torch.float8_e8m0fnu).to(torch.float32)
        rows, columns = whole.shape
        each = factors.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
        return data.to(torch.float32).mul_(each)
