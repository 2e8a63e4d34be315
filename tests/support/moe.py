"""Mixtures of experts for tests: experts whose rows are sorted already, a layer with a router, and the products of one expert
computed by the reference operations of matrices, as an oracle."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowering.casts import cast_with_scales
from lowering.formats import E4M3, E5M2, Granularity
from lowering.gemm import scaled_mm
from lowering.tensorwise import reference as tensorwise
from tests.support.copies import one_copy

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")


def offsets(sizes: Sequence[int]) -> torch.Tensor:
    """Cumulative ends of groups of these sizes."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


class Experts(nn.Module):
    """One weight per expert, [E, N, K] as nn.Linear has it."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, outputs, inputs, dtype=dtype) / inputs**0.5)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs)


class FallbackExperts(Experts):
    """By transformers' loop over the experts, whose backward is one operation that computes both gradients."""

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight.transpose(-2, -1), offs)


class GatheredExperts(Experts):
    """The experts of rows that `index` chooses."""

    def forward(self, x: torch.Tensor, offs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return super().forward(x[index], offs)


class MoE(nn.Module):
    """A router and SwiGLU experts, sorted and gathered as transformers does it. `compute`: the dtype of the experts' GEMMs, of
    which torch traces bfloat16 alone."""

    def __init__(
        self, dim: int = 64, hidden: int = 48, num_experts: int = 4, top_k: int = 2, compute: torch.dtype = torch.bfloat16
    ):
        super().__init__()
        self.top_k, self.num_experts, self.compute = top_k, num_experts, compute
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, 2 * hidden, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, dim, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.top_k)
        return self.experts(x, weights, chosen)

    def experts(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The experts' part for given choices [T, top_k]; a choice of `num_experts` or more is another rank's."""
        ids, perm = chosen.reshape(-1).sort()
        counts = torch.histc(ids.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        gathered = x[perm // self.top_k].to(self.compute)
        gate, up = torch._grouped_mm(gathered, self.up.to(self.compute).transpose(-2, -1), offs).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.to(self.compute).transpose(-2, -1), offs)
        is_ours = (ids < self.num_experts)[:, None]
        out = torch.where(is_ours, out * weights.reshape(-1)[perm][:, None].to(out.dtype), 0)
        inverse = torch.empty_like(perm).scatter(0, perm, torch.arange(perm.shape[0], device=perm.device))
        return out[inverse].view(x.shape[0], self.top_k, -1).sum(1).to(x.dtype)


# -- the oracle: one expert at a time


def expected(recipe: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Output, grad_input and grad_weight of `Experts` by a loop over the experts with the casts and the GEMM of matrices.

    Rows beyond the groups are zeros in the results. Delayed scaling: the first step, which scales as current scaling does.
    """
    total = sum(sizes)
    shared = {"input": tensorwise.amax(x[:total]), "grad_output": tensorwise.amax(dy[:total])}
    multiply = functools.partial(_multiply, recipe, shared)
    out = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
    dx, dw = torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        if size:
            out[rows] = multiply(("input", x[rows], False), ("weight", w[e], False))
            dx[rows] = multiply(("grad_output", dy[rows], False), ("weight", w[e], True))
            dw[e] = multiply(("grad_output", dy[rows], True), ("input", x[rows], True))
    return out, dx, dw


Operand = tuple[str, torch.Tensor, bool]
"""Its kind, the matrix, and whether the GEMM reads its columnwise copy."""
#: The options of casts, of recipes whose scales lie within the rows or columns of each expert.
_OF_LINES = {
    "rowwise": {"granularity": "row_wise", "power_of_2": True},
    "mxfp8": {"granularity": "block_1x32"},
    "blockwise": {"power_of_2": True},
}


def _multiply(recipe: str, amaxes: dict[str, torch.Tensor], *operands: Operand) -> torch.Tensor:
    """Of rows and columns of one expert; amaxes: those that all experts share, where there is one scale per tensor."""
    copies, kinds = [], [(Granularity.BLOCK_128X128 if o[0] == "weight" else Granularity.BLOCK_1X128).value for o in operands]
    for (kind, matrix, columnwise), granularity in zip(operands, kinds, strict=True):
        layout: dict[str, Any] = one_copy(columnwise=columnwise, pad_outer=True)
        if recipe in _OF_LINES:
            layout |= {"granularity": granularity} if recipe == "blockwise" else {}
            copies.append(cast_with_scales([matrix], E4M3, **layout, **_OF_LINES[recipe]))
        else:
            dtype = E5M2 if kind == "grad_output" else E4M3
            scale = tensorwise.scale_from_amax(amaxes.get(kind, tensorwise.amax(matrix)), dtype)
            copies.append([*tensorwise.cast([matrix], [scale], dtype, **layout), scale.reciprocal()])
    (a, scale_a), (b, scale_b) = copies
    kinds = kinds if recipe == "blockwise" else [{"rowwise": "row_wise", "mxfp8": "block_1x32"}.get(recipe, "tensor_wise")] * 2
    options: dict[str, Any] = {"granularity_a": kinds[0], "granularity_b": kinds[1]}
    out = scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=operands[0][1].dtype, **options)
    rows, cols = (matrix.shape[1] if columnwise else matrix.shape[0] for _, matrix, columnwise in operands)
    return out[:rows, :cols]
