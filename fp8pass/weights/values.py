"""What the bytes of kept copies stand for."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.graph.casts import Layout
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.names import TensorName
from fp8pass.graph.values import MatrixValue
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes.copies import Copy, Quantized
from fp8pass.schemes.table import scheme_of
from fp8pass.weights.kept import QuantizedWeight


def values_of(recipe: Recipe, quantization: Quantization, made: QuantizedWeight, shape: tuple[int, ...]) -> torch.Tensor:
    """The float32 values of a weight [rows, cols] or [batch, rows, cols], by its copy that is read first."""
    data, scales = bytes_and_scales(recipe, quantization, made, shape)
    return data.float() * scales


def bytes_and_scales(
    recipe: Recipe, quantization: Quantization, made: QuantizedWeight, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 bytes of a weight without padding, and what each is multiplied by, float32, of the same shape: views where that
    takes no more than a transpose."""
    layout = next(iter(made.data))
    data, scale_inv = made.data[layout], made.scale_inv[layout]
    if len(shape) == 3:
        of_each = [_of_matrix(recipe, quantization, layout, data[i], scale_inv[i], shape[1:]) for i in range(shape[0])]
        stacked = torch.stack([q.view(torch.uint8) for q, _ in of_each]).view(data.dtype)
        return stacked, torch.stack([scales for _, scales in of_each])
    return _of_matrix(recipe, quantization, layout, data, scale_inv, shape)


def _of_matrix(
    recipe: Recipe,
    quantization: Quantization,
    layout: Layout,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    graph, mode = fx.Graph(), FakeTensorMode()
    q, factors = graph.placeholder("data"), graph.placeholder("scale_inv")
    q.meta["val"], factors.meta["val"] = mode.from_tensor(data), mode.from_tensor(scale_inv)
    output = graph.output(())
    rows, cols = shape
    copy = Copy(MatrixValue(q, rows, cols), layout.columnwise, quantization, recipe, TensorName("weight", "weight"))
    cursor = Cursor(graph, output, False, None, mode)
    scales = scheme_of(quantization).scales_of_values(cursor, Quantized(q, factors, copy, q))
    output.args = (scales,)
    found = fx.GraphModule(torch.nn.Module(), graph)(data, scale_inv).expand(data.shape)
    if layout.columnwise:
        data, found = data.t(), found.t()
    return data[:rows, :cols], found[:rows, :cols]
