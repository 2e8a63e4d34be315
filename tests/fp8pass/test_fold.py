"""Elements of vectors that our operations read become vectors and positions, with the same results."""

import operator

import pytest
import torch
from torch import fx

from fp8pass import inspect
from fp8pass.rewrite.runner import without
from fp8pass.rewrite.simplify import fold_elements
from tests.support.models import LlamaBlock
from tests.support.training import assert_equal, compiled_step

aten = torch.ops.aten
ops = torch.ops.lowering
E4M3 = torch.float8_e4m3fn


def graph_of(*inputs: torch.Tensor) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{i}") for i in range(len(inputs))]
    for node, value in zip(nodes, inputs, strict=True):
        node.meta["val"] = value
    return graph, nodes


def element(graph: fx.Graph, vector: fx.Node, position: int) -> fx.Node:
    return graph.call_function(aten.select.int, (vector, 0, position))


def run(graph: fx.Graph, *inputs: torch.Tensor):
    graph.lint()
    return fx.GraphModule({}, graph)(*inputs)


def test_casts_and_gemms_of_elements():
    x, scales, inverses = torch.randn(32, 16), torch.tensor([4.0, 2.0, 8.0]), torch.tensor([0.25, 0.5, 0.125])
    graph, (a, s, i) = graph_of(x, scales, inverses)
    rows = graph.call_function(ops.cast.default, ([a], [element(graph, s, 1)], E4M3))
    other = graph.call_function(ops.cast.default, ([a], [element(graph, s, 2)], E4M3))
    row, turned = (graph.call_function(operator.getitem, (cast, 0)) for cast in (rows, other))
    turned = graph.call_function(aten.permute.default, (turned, [1, 0]))
    gemm = graph.call_function(ops.scaled_mm.default, (row, turned, element(graph, i, 1), element(graph, i, 2), None))
    graph.output(gemm)
    wanted = run(graph, x, scales, inverses)
    fold_elements(graph)
    assert not graph.find_nodes(op="call_function", target=aten.select.int)
    assert rows.args[1] == [s]
    assert rows.kwargs == {"scales_index": [1]}
    assert gemm.kwargs == {"scale_inv_a_index": 1, "scale_inv_b_index": 2}
    assert torch.equal(run(graph, x, scales, inverses), wanted)
    once = str(graph)
    fold_elements(graph)
    assert str(graph) == once
    x, y, scales, single = torch.randn(16, 16), torch.randn(32, 48), torch.tensor([4.0, 2.0]), torch.tensor(8.0)
    graph, (a, b, s, one) = graph_of(x, y, scales, single)
    cast = graph.call_function(ops.cast.default, ([a, b], [element(graph, s, 1), one], E4M3))
    graph.output(cast)
    wanted = run(graph, x, y, scales, single)
    fold_elements(graph)
    assert (cast.args[1], cast.kwargs) == ([s, one], {"scales_index": [1, -1]})
    for made, other in zip(run(graph, x, y, scales, single), wanted, strict=True):
        assert torch.equal(made.float(), other.float())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_training_is_the_same_without_it_and_backward_gets_fewer_inputs(recipe):
    model, x = LlamaBlock(64, 128, 2), torch.randn(1, 16, 64)
    results, saved = [], []
    for left_out in ((), ("fold elements",)):
        with without(*left_out):
            compiled, found = compiled_step(model, recipe, x, count=3)
        results.append(found)
        saved.append(len(inspect(compiled).graphs[0].backward.graph.find_nodes(op="placeholder")))
    assert_equal(*results)
    assert saved[0] < saved[1]
