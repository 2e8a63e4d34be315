"""One scale per tensor, from the tensor itself or from the state: the casts, the GEMM, and how copies travel.

One scale makes quantization elementwise: it commutes with gathers, transposes and all other moves. A tensor that is sharded
over ranks and gathered in FP8 gets one scale by an all-reduce of the amax, or the one that all ranks have in their states.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

import torch

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gathers import Gather
from fp8pass.graph.gemms import GemmSite
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.schemes.copies import Cast, Layout, QuantizedTensor, padding_of
from fp8pass.schemes.scheme import Scheme, engine_obstacle, part_obstacle

ops = torch.ops.lowering

CASTS = ops.cast.default


class TensorScheme(Scheme):
    """One scale per tensor; in batched weights each matrix has its own. A shared one is stored once per row, for a row-wise
    GEMM."""

    casts = CASTS
    computes_scales = False

    def __init__(self, scale_from: ScaleFrom):
        self.keeps_state, self._is_shared = scale_from is ScaleFrom.STATE, scale_from is ScaleFrom.SHARED
        self.has_one_scale = not self._is_shared
        self.num_reads = 1 if self.keeps_state else 2

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        pairs = zip(site.operands, quantizations, strict=True)
        if not any(o.value.groups is not None and q.scale_from is ScaleFrom.SHARED for o, q in pairs):
            return None
        return Reason(ReasonKind.OPERAND_FORMATS, "one scale for the rows of several groups; a scale per row runs")

    def launch_key(self, cast: Cast) -> Hashable | None:
        if self._is_shared:
            return cast.layouts if any(layout.columnwise for layout in cast.layouts) else None
        return (cast.layouts, cast.is_first)

    def can_transpose(self, quantization: Quantization) -> bool:
        return not self._is_shared

    def sent(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Mapping[Hashable, Fraction]:
        return {tensor: Fraction(1)}

    def gather_obstacle(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Reason | None:
        obstacle = engine_obstacle(tensor.quantization) or self.shard_obstacle(tensor.quantization, gather.shares_scales)
        obstacle = obstacle or part_obstacle(tensor, gather)
        if obstacle is None and any(padding_of(tensor.value, layout) is None for layout in layouts):
            obstacle = Reason(ReasonKind.SHAPE, "dynamic sizes may need padding to multiples of 16")
        return obstacle

    def shard_obstacle(self, quantization: Quantization, shares_scales: bool) -> Reason | None:
        if not quantization.has_state:
            return None
        if not quantization.same_on_ranks:
            return Reason(ReasonKind.SCALES, "reduce_amax=False, so ranks scale the tensor differently")
        if not shares_scales:
            return Reason(ReasonKind.SCALES, "amax_reduction_group does not contain all ranks of the gather")
        return None

    def sharded(self, quantization: Quantization, rows: int, elements: int, is_even: bool) -> Fraction | Reason:
        if self._is_shared:
            return Reason(ReasonKind.BYTES, "forward and backward need copies with different scales")
        return engine_obstacle(quantization) or Fraction(1)
