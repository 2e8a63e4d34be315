"""The typed view of casts: what is inserted is what is read back, and every output is what the view calls it."""

import itertools

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fp8pass.graph.cursor import Cursor
from fp8pass.rewrite.meaning import CASTS
from fp8pass.schemes import tensorwise
from fp8pass.schemes.blocks import BlockwiseScheme
from fp8pass.schemes.copies import Layout, insert_cast
from lowering.formats import E4M3, E5M2
from tests.support.cases import each
from tests.support.copies import CastNode
from tests.tolerances import FP8_STEP, FP8_STEP_AT_ZERO

ops = torch.ops.lowering
ROW, COLUMN = Layout(False), Layout(True)
WIDE_ROW, WIDE_COLUMN = Layout(False, True), Layout(True, True)
LAYOUTS = [(ROW,), (COLUMN,), (WIDE_ROW,), (WIDE_COLUMN,)]
LAYOUTS += list(itertools.product((ROW, WIDE_ROW), (COLUMN, WIDE_COLUMN)))
BLOCKS = {"granularity": "block_1x128", "power_of_2": False, "epsilon": 0.0}
SHAPE = (20, 40)
"""Rows are padded to 32 where the outer dimension is padded; columns to 48, as K always is; both differ."""


def cursor_of(num_matrices=1):
    """A graph with matrices x0, x1, ..., a scale and scales for all of them; and a cursor."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(num_matrices)] + [
        graph.placeholder("scale"),
        graph.placeholder("scales"),
    ]
    with FakeTensorMode():
        values = [torch.empty(SHAPE) for _ in range(num_matrices)] + [torch.empty(()), torch.empty(num_matrices)]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    graph.output(())
    return Cursor.start(graph), nodes


def results(cursor, nodes, *values):
    """What nodes hold when the graph runs."""
    cursor.graph.output_node().args = (tuple(nodes),)
    return fx.GraphModule({}, cursor.graph)(*values)


def padded(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The matrix as an FP8 copy of this layout holds it, but for its precision."""
    outer, inner = (x.t() if layout.columnwise else x).shape
    rows, cols = -(-outer // 16) * 16 if layout.pads_outer else outer, -(-inner // 16) * 16
    result = torch.zeros(rows, cols)
    result[:outer, :inner] = x.t() if layout.columnwise else x
    return result


def assert_is_copy(data, scale, x, layout, dtype):
    expected = padded(x, layout)
    assert data.dtype is dtype
    assert data.shape == expected.shape
    assert data.is_contiguous()
    assert torch.allclose(data.float() / scale, expected, rtol=FP8_STEP[dtype], atol=FP8_STEP_AT_ZERO)


def ids(layouts):
    return "+".join(("columnwise" if x.columnwise else "rowwise") + ("-padded" if x.pads_outer else "") for x in layouts)


@each("with_amax", [False, True])
@each("layouts", LAYOUTS)
@each("dtype", [E4M3, E5M2])
def test_one_scale(layouts, dtype, with_amax):
    cursor, (x, scale, _) = cursor_of()
    node, ((data, inverses, made),) = insert_cast(cursor, tensorwise.CASTS, [x], dtype, layouts, [scale], with_amax)
    view = CastNode.read(node)
    assert (view.matrices, view.scale, view.dtype, view.options) == ((x,), (scale,), dtype, {})
    assert view.orientations == tuple(layout.columnwise for layout in layouts)
    assert inverses == []
    assert (made is not None) == with_amax
    values, factor = torch.randn(SHAPE), torch.tensor(2.0)
    *copies, amax = results(cursor, [*data, made or x], values, factor, factor)
    for data, layout in zip(copies, layouts, strict=True):
        assert_is_copy(data, factor, values, layout, dtype)
    if with_amax:
        assert amax.equal(values.abs().max())


@each("layouts", LAYOUTS)
@each("dtype", [E4M3, E5M2])
def test_scales_that_the_cast_computes(layouts, dtype):
    cursor, (x, *_) = cursor_of()
    node, ((copies, inverses, amax),) = insert_cast(cursor, BlockwiseScheme.casts, [x], dtype, layouts, **BLOCKS)
    view = CastNode.read(node)
    assert (view.matrices, view.scale, view.dtype, view.options) == ((x,), None, dtype, BLOCKS)
    assert view.orientations == tuple(layout.columnwise for layout in layouts)
    assert amax is None
    outputs = [node for pair in zip(copies, inverses, strict=True) for node in pair]
    values = torch.randn(SHAPE)
    found = results(cursor, outputs, values, torch.ones(()), torch.ones(1))
    for (data, scale_inv), layout in zip(zip(found[::2], found[1::2], strict=True), layouts, strict=True):
        expected = padded(values, layout)
        assert scale_inv.shape == (1, expected.shape[0]), "one block per row: the sums are shorter than 128"
        assert_is_copy(data, 1 / scale_inv.t(), values, layout, dtype)


@pytest.mark.parametrize("with_amax", [False, True])
@pytest.mark.parametrize("layouts", [ls for ls in LAYOUTS if len(ls) == 2], ids=ids)
def test_several_matrices_in_one_launch(layouts, with_amax):
    cursor, (first, second, third, _, scales) = cursor_of(3)
    each = [cursor.call(torch.ops.aten.select.int, scales, 0, i) for i in range(3)]
    node, made = insert_cast(cursor, tensorwise.CASTS, [first, second, third], E4M3, layouts, each, with_amax)
    view = CastNode.read(node)
    assert (view.matrices, view.scale, view.dtype) == ((first, second, third), tuple(each), E4M3)
    assert (view.orientations, view.options) == ((False, True), {})
    values, factors = [torch.randn(SHAPE) for _ in range(3)], torch.tensor([8.0, 1.0, 4.0])
    outputs = [n for data, _, amax in made for n in (*data, amax or first)]
    found = results(cursor, outputs, *values, torch.ones(()), factors)
    for i, (x, factor) in enumerate(zip(values, factors, strict=True)):
        for data, layout in zip(found[3 * i :], layouts, strict=False):
            assert_is_copy(data, factor, x, layout, E4M3)
        assert (made[i][2] is not None) == with_amax
        if with_amax:
            assert found[3 * i + 2].equal(x.abs().max())


def test_every_operation_that_quantizes_is_known():
    every = {name for name in dir(ops) if "cast" in name or name == "quantize"}
    assert every == {target._schema.name.partition("::")[2] for target in CASTS}


@pytest.mark.parametrize("target", [ops.scaled_mm.default, ops.amax.default, torch.ops.aten.relu.default])
def test_other_operations_are_no_casts(target):
    graph = fx.Graph()
    assert CastNode.read(graph.call_function(target, ())) is None
    assert CastNode.read(graph.placeholder("cast")) is None
