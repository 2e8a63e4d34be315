"""Current scaling: one scale per tensor, from the tensor itself. Source: TransformerEngine's Float8CurrentScaling.

In a graph: the amax of every tensor, its scale and the reciprocal, then the cast. A tensor that is sharded over ranks and
gathered in FP8 gets one scale by an all-reduce of the amax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.recipes.options import (
    FAST_ACCUM,
    BackwardOverride,
    Format,
    check_bools,
    check_epsilon,
    check_format,
    check_override,
    recipe,
)
from fp8pass.recipes.recipe import Emitter, QuantizedTensor, Scope
from fp8pass.recipes.tensorwise import TensorwiseEmitter, TensorwiseRecipe, amax_of, selected_pairs

ops = torch.ops.lowering


@recipe
class Float8CurrentScaling(TensorwiseRecipe):
    """One scale per tensor, from the tensor itself: its amax is read first. Source: TransformerEngine."""

    name: ClassVar[str] = "current"
    reads: ClassVar[int] = 2

    fp8_format: Format = Format.HYBRID
    """FP8 formats of forward tensors and of gradients."""
    use_power_2_scales: bool = False
    """Whether scales are rounded down to powers of two."""
    amax_epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""
    fast_accum_output: bool = True
    """Whether the forward GEMM may use the tensor cores' faster, less precise accumulator."""
    fast_accum_grad_input: bool = False
    """The same for the grad_input GEMM."""
    fast_accum_grad_weight: bool = False
    """The same for the grad_weight GEMM."""

    def __post_init__(self) -> None:
        check_format(self)
        check_epsilon(self)
        check_bools(self, "use_power_2_scales", *FAST_ACCUM)
        check_override(self)

    def emitter(self, scope: Scope) -> Emitter:
        return CurrentEmitter(self, scope)


class CurrentEmitter(TensorwiseEmitter):
    """Scales from amaxes."""

    def _pair(self, cursor: Cursor, amax: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
        """Scale and reciprocal from one operation: Triton's float32 division, which is what Inductor makes of
        aten.reciprocal, does not round correctly."""
        options = {"epsilon": self.recipe.amax_epsilon, "power_of_2": self.recipe.use_power_2_scales}
        pair = cursor.call(ops.scales_from_amax.default, amax, dtype, **options)
        return cursor.item(pair, 0), cursor.item(pair, 1)

    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> tuple[fx.Node, fx.Node]:
        return self._pair(cursor, amax_of(cursor, tensor, matrix), tensor.dtype)

    def scales_of(
        self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        pair = self._pair(cursor, cursor.call(ops.multi_amax.default, list(matrices)), tensors[0].dtype)
        return selected_pairs(cursor, pair, len(tensors))

    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> tuple[fx.Node, fx.Node]:
        amax = cursor.call(ops.amax.default, gather.shard_as_matrix(cursor))
        return self._pair(cursor, gather.largest_of_ranks(cursor, amax), tensor.dtype)
