"""One weight that FSDP2 gathers with scales of square blocks: values and scales travel, one copy for both orientations.

Blocks do not cross shards, so a rank's scales are those of the whole weight. After the gather both copies are laid out as GEMMs
read them; FSDP2 frees them with what arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8pass.graph.casts import Layout
from fp8pass.schemes import eager
from fp8pass.schemes.eager import Made
from fp8pass.weights.fsdp import Managed
from fp8pass.weights.gathered import Batch, GatheredWeight, Owner
from fp8pass.weights.kept import KeptWeight
from fp8pass.weights.keys import WeightKey
from fp8pass.weights.withheld import write


class GatheredBlocks(GatheredWeight):
    """A weight with one scale per square block. No scale is decided before a gather."""

    def __init__(self, managed: Managed, weight: KeptWeight, batch: Batch, owner: Owner):
        super().__init__(managed, weight, batch, owner)
        self._compact: tuple[torch.Tensor, ...] = ()
        """Values [rows, columns] and scales, in the compact format: what arrived."""
        self._ready: dict[Layout, list[torch.Tensor]] = {}
        """Data and scales of each copy."""

    @property
    def knows_scale(self) -> bool:
        return True

    @property
    def derived(self) -> list[torch.Tensor]:
        return [tensor for copy in self._ready.values() for tensor in copy]

    @property
    def wanted(self) -> tuple[Layout, ...]:
        """The copies that are made of what arrives."""
        return self.weight.layouts

    def has(self, layouts: Sequence[Layout]) -> bool:
        if not super().has(layouts):
            return False
        new = [layout for layout in layouts if layout not in self._ready]
        with torch.inference_mode(False), torch.no_grad():
            self._lay_out(new, *self._compact)
        self.managed.parameter._unsharded_inner_tensors += [tensor for layout in new for tensor in self._ready[layout]]
        return True

    def copy_of(self, layout: Layout) -> list[torch.Tensor]:
        """Data and scales."""
        return self._ready[layout]

    def part(self, key: WeightKey) -> torch.Tensor:
        assert key.layout is not None
        return self.copy_of(key.layout)[0 if key.part == "data" else 1]

    def compact(self, x: torch.Tensor, is_shard: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of the shard, or of the whole weight."""
        return eager.compact(x, self.weight.quantization)

    def quantized(self) -> tuple[tuple[torch.Tensor, ...], Made]:
        managed = self.managed
        data, scales = self.compact(managed.shard.detach().to(managed.dtype), is_shard=True)
        return (data.view(torch.uint8), scales.view(torch.uint8)), Made((data,), (scales,))

    def take(self, made: Made, whole: torch.Tensor) -> None:
        if not self._compact:
            (data,), (scales,) = made.data, made.scale_inv
            self._compact = (self._arrived[0].view(whole.shape).view(data.dtype), self.scales_of(scales))
        self._lay_out(self.wanted, *self._compact)

    def scales_of(self, sent: torch.Tensor) -> torch.Tensor:
        """The scales of the whole weight, of those that this rank sent."""
        width = sent.shape[1] * sent.element_size()
        return self._arrived[1].view(-1, width).view(sent.dtype)

    def fill(self, whole: torch.Tensor) -> None:
        self._lay_out(self.wanted, *self.compact(whole, is_shard=False))

    def _lay_out(self, layouts: Sequence[Layout], data: torch.Tensor, scales: torch.Tensor) -> None:
        for layout in layouts:
            made = eager.ready(data, scales, self.weight.quantization, layout)
            if layout not in self._ready:
                self._ready[layout] = [torch.empty_like(x) for x in made]
            for target, values in zip(self._ready[layout], made, strict=True):
                write(target, values)

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        data, scales = self._compact
        return eager.compact_values(data, scales, self.weight.quantization)
