"""What quantization does to the operands of a product, by the emitters that make the casts of a rewritten graph.

A scale from the state is that of a tensor without a history: its own.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.graph.casts import Layout
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.names import Kind, TensorName
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import MatrixValue
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes.copies import Cast, Copy, FromValue, QuantizedTensor
from fp8pass.schemes.scheme import FIRST_STEP, Read, Scope, StateNodes
from fp8pass.schemes.table import scheme_of
from lowering.formats import Granularity


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What a GEMM reads instead of an operand."""

    quantization: Quantization
    kind: Kind
    """Whether the operand is a weight: then each matrix of a batch has scales of its own, else a batch is one tensor."""
    recipe: Recipe

    @property
    def has_state(self) -> bool:
        """Whether the scale comes from the state."""
        return self.quantization.scale_from is ScaleFrom.STATE

    @property
    def has_one_scale(self) -> bool:
        """Whether all elements of a tensor share a scale, of a batch of weights those of each matrix."""
        return self.quantization.granularity is Granularity.TENSOR_WISE or self.quantization.scale_from is ScaleFrom.SHARED


def rounded(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """A matrix [outer, inner], or a batch of them, as FP8 holds it: float32 of the same shape. The GEMM sums over `inner`."""
    if x.dim() == 3 and (rounding.kind == "weight" or not rounding.has_one_scale):
        return torch.stack([rounded(matrix, rounding) for matrix in x])
    if not x.numel():
        return x.float()
    matrix = x.reshape(-1, x.shape[-1]).contiguous()
    rows, cols = matrix.shape
    quantize = _quantizer(rounding, (rows, cols), matrix.dtype, matrix.device)
    state = (torch.zeros(1, device=x.device), torch.zeros(1, dtype=torch.int64, device=x.device)) if rounding.has_state else ()
    found: torch.Tensor = quantize(matrix, *state)
    return found[:rows, :cols].reshape(x.shape)


@functools.lru_cache(maxsize=256)
def _quantizer(rounding: Rounding, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> fx.GraphModule:
    """The graph of one matrix: quantize, dequantize. A scale from the state is 0, as that of an empty history."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def placeholder(name: str, size: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(size, dtype=dtype, device=device)
        return node

    node, state = placeholder("x", shape, dtype), None
    if rounding.has_state:
        scale, slots = placeholder("scale", (1,), torch.float32), placeholder("slots", (1,), torch.int64)
        state = StateNodes(scale, scale, scale, slots)
    output = graph.output(node)
    cursor = Cursor(graph, output, False, None, mode)  # not that of a graph that is being compiled
    value, name = MatrixValue(node, *shape), TensorName("x", rounding.kind)
    tensor = QuantizedTensor(value, rounding.quantization, rounding.recipe, name)
    copy = Copy(value, False, rounding.quantization, rounding.recipe, name)
    site = GemmSite(output, "x", None, "output", 0, *shape, "", None, None, False)
    scheme = scheme_of(rounding.quantization)
    emitter = scheme.emitter(Scope((tensor,), state, True, frozenset({FIRST_STEP})))
    emitter.begin(cursor)
    ((made,),) = emitter.quantize(cursor, [Cast((copy,), (Layout(False),), site, FromValue(), dtype)], [Read(node)])
    output.args = (scheme.dequantize(cursor, made),)
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def product_error(
    a: torch.Tensor, b: torch.Tensor, of_a: Rounding, of_b: Rounding, offs: torch.Tensor | None = None
) -> torch.Tensor:
    """What quantizing both operands adds to a [m, k] @ b [k, n], or to their batched product: float32, of its shape.

    offs: where the groups of a grouped product end, among the rows of a, or, of two matrices, along what is summed over. Rows
    behind the last group are zeros.
    """
    if offs is None:
        return rounded(a, of_a) @ rounded(b.mT, of_b).mT - a.float() @ b.float()
    ends = [int(end) for end in offs.tolist()]
    if b.dim() == 2:
        a, b = a[:, : ends[-1]], b[: ends[-1]]
        near_a, near_b = _in_groups(a, of_a, ends), _in_groups(b.mT, of_b, ends).mT
    else:
        a = a.clone()
        a[ends[-1] :] = 0  # they reach no amax that other rows share
        near_a, near_b = rounded(a, of_a), rounded(b.mT, of_b).mT
    return _grouped(near_a, near_b, ends) - _grouped(a.float(), b.float(), ends)


def _in_groups(x: torch.Tensor, rounding: Rounding, ends: list[int]) -> torch.Tensor:
    """[outer, slots]: one scale is that of all groups, and blocks along the slots begin with each group."""
    if rounding.has_one_scale:
        return rounded(x, rounding)
    return torch.cat([rounded(x[:, part], rounding) for part in _parts(ends)], 1)


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    if b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in _parts(ends)])
    product = a.new_zeros(len(a), b.shape[-1])
    for part, matrix in zip(_parts(ends), b, strict=True):
        product[part] = a[part] @ matrix
    return product


def _parts(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
