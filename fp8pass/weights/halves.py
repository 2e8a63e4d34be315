"""One weight whose copies for forward and backward have different scales: FSDP2 gathers one before each of them.

NOTE [two gathers] With `reshard_after_forward=True` FSDP2 frees a Parameter after the forward and gathers it again for the
backward. The first gather brings the rowwise copy, which forward GEMMs read, the second the columnwise one. Graphs have both as
inputs: the columnwise copy has no content in the forward, which only saves views of it. FSDP2 frees it with the Parameter, and
the second gather fills it.

NOTE [forward again] A forward that is run again in the backward, by activation checkpointing outside of the compiled graphs,
would need the copy that is not there. It is seen in the first backward, before anything travels in FP8, and such a weight stays
in high precision; a model that begins to do so later is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8pass.errors import OptionError
from fp8pass.graph.casts import Layout
from fp8pass.schemes import eager, scheme_of
from fp8pass.schemes.eager import CastKind, Made, example
from fp8pass.weights.blocks import GatheredBlocks
from fp8pass.weights.fsdp import Managed
from fp8pass.weights.gathered import Batch, Owner, in_backward
from fp8pass.weights.kept import KeptWeight
from fp8pass.weights.withheld import write


class GatheredHalves(GatheredBlocks):
    """Invariant: what arrived, its parts and the copies made of them are those of one side, `_columnwise`."""

    def __init__(self, managed: Managed, weight: KeptWeight, batch: Batch, owner: Owner):
        super().__init__(managed, weight, batch, owner)
        self._columnwise = False
        """Which copy the last gather brought, or would have in FP8."""
        self._other: tuple[list[torch.Tensor], tuple[torch.Tensor, ...], dict[Layout, list[torch.Tensor]]] = ([], (), {})
        """The memory of the other side: what arrived, its parts, copies."""
        self.is_run_again = False
        """Whether a forward was run again in a backward."""
        self.may_train = False
        """Whether forwards with gradients may gather FP8: all ranks have seen a backward."""
        self.amaxes: torch.Tensor | None = None
        """[columns] float32, of the whole weight, where scales of columns need those of all ranks; as of this forward."""

    @property
    def needs_amaxes(self) -> bool:
        """Whether a column has one scale, though its elements are on all ranks."""
        return scheme_of(self.weight.quantization).scales_columns

    @property
    def knows_scale(self) -> bool:
        return not self._is_known or self.amaxes is not None

    def has(self, layouts: Sequence[Layout]) -> bool:
        if self._columnwise:
            if self.is_here and self.came_in_fp8:
                raise OptionError(
                    f"fsdp_gather='fp8': {self.managed.name} is read by a forward that is run again in the backward, which has"
                    f" another copy of it: checkpoint activations inside of what is compiled, or leave fsdp_gather out for"
                    f" the recipe {self.weight.recipe.name!r}"
                )
            return False
        if not super().has([layout for layout in layouts if not layout.columnwise]):
            return False
        copies = self._other[2]
        for layout in layouts:
            if layout.columnwise and layout not in copies:
                copies[layout] = self._empty(layout)
                self.managed.parameter._unsharded_inner_tensors += copies[layout]
        return True

    def _empty(self, layout: Layout) -> list[torch.Tensor]:
        weight = self.weight
        kind = CastKind(weight.recipe, weight.quantization, (layout,), weight.dtype, weight.device)
        made = example(kind, weight.shape)
        with torch.inference_mode(False):
            return [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=weight.device)
                for x in (made.data[0], made.scale_inv[0])
            ]

    @property
    def derived(self) -> list[torch.Tensor]:
        owner = self.owner()
        is_saved = not self._columnwise and owner is not None and owner.trains
        copies = [*self._ready.values(), *(self._other[2].values() if is_saved else ())]
        return [tensor for copy in copies for tensor in copy]

    def copy_of(self, layout: Layout) -> list[torch.Tensor]:
        is_here = layout.columnwise == self._columnwise
        return (self._ready if is_here else self._other[2])[layout]

    @property
    def wanted(self) -> tuple[Layout, ...]:
        return tuple(layout for layout in self.weight.layouts if layout.columnwise == self._columnwise)

    def before(self) -> tuple[tuple[torch.Tensor, ...], Made | None]:
        # What others gather between forward and backward is for the backward, too.
        self._turn(in_backward() or not self.is_in_forward)
        return super().before()

    def _turn(self, columnwise: bool) -> None:
        if columnwise != self._columnwise:
            here = (self._arrived, self._compact, self._ready)
            (self._arrived, self._compact, self._ready), self._other = self._other, here
            self._columnwise = columnwise

    def travels_in_fp8(self) -> bool:
        found, owner = super().travels_in_fp8(), self.owner()
        if in_backward() or not self.is_in_forward:
            return found
        self.was_fp8 = found and owner is not None and (self.may_train or not owner.trains)
        return self.was_fp8

    @property
    def is_for(self) -> str:
        if self.is_run_again or self.is_read:
            return ""
        return "all" if self.weight.trains else "inference"

    def take_part(self) -> None:
        self.may_train = self.is_for == "all"

    def compact(self, x: torch.Tensor, is_shard: bool) -> tuple[torch.Tensor, torch.Tensor]:
        amaxes = self.amaxes if is_shard and self.needs_amaxes and self._columnwise else None
        return eager.compact(x, self.weight.quantization, columnwise=self._columnwise, amaxes=amaxes)

    def quantized(self) -> tuple[tuple[torch.Tensor, ...], Made]:
        sent, made = super().quantized()
        return (sent[:1] if self._is_known else sent), made

    def take(self, made: Made, whole: torch.Tensor) -> None:
        if self._is_known and self._compact:
            write(self._compact[1], made.scale_inv[0])
        super().take(made, whole)

    def scales_of(self, sent: torch.Tensor) -> torch.Tensor:
        return sent.clone() if self._is_known else super().scales_of(sent)

    @property
    def _is_known(self) -> bool:
        """Whether every rank has all scales before the gather."""
        return self._columnwise and self.needs_amaxes
