"""The cursor: values, origin, side of the partition and recomputation of the nodes that it inserts."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.graph import cursor as module
from fp8pass.graph.cursor import Cursor

aten = torch.ops.aten


@pytest.fixture
def graph():
    """relu(x) + tangent as a joint graph's nodes look."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        values = [torch.empty(4, 6), torch.empty(4, 6)]
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    relu = graph.call_function(aten.relu.default, (x,))
    total = graph.call_function(aten.add.Tensor, (relu, tangent))
    graph.output(total)
    for node, value in zip((x, tangent, relu, total), [*values, *values], strict=True):
        node.meta["val"] = value
    relu.meta |= {"stack_trace": "line", "seq_nr": 7, "nn_module_stack": {"1": ("a", "b")}, "recompute": "not to be copied"}
    relu.meta |= {"partitioner_tag": "not to be copied", "from_node": "not to be copied"}
    assert mode is values[0].fake_mode
    return graph


def named(graph):
    return {n.name.removesuffix("_default").removesuffix("_tensor"): n for n in graph.nodes}


def test_a_new_node_has_a_value_an_origin_and_a_side(graph):
    start, relu = Cursor.start(graph), named(graph)["relu"]
    assert start.before is relu
    node = start.call(aten.sum.dim_IntList, named(graph)["primals_1"], [1], keepdim=True)
    assert node.next is relu
    assert (node.args, node.kwargs) == ((named(graph)["primals_1"], [1]), {"keepdim": True})
    assert tuple(node.meta["val"].shape) == (4, 1)
    assert set(node.meta) == {"val", "stack_trace", "seq_nr", "nn_module_stack", "partitioner_tag"}
    assert [node.meta[key] for key in ("stack_trace", "seq_nr", "partitioner_tag")] == ["line", 7, "is_forward"]
    assert [module.pin(node, backward) or node.meta["partitioner_tag"] for backward in (False, True)] == [
        "must_be_in_forward", "must_be_in_backward",
    ]  # fmt: skip
    relu.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node = start.sharing(relu).at(named(graph)["add"], backward=True).call(aten.neg.default, relu)
    assert (node.next, node.meta["partitioner_tag"]) == (named(graph)["add"], "is_backward")
    assert set(node.meta) == {"val", "partitioner_tag"}, "the origin of `add`, which has none, and no recomputation"


def test_equal_calls_are_traced_once_and_have_values_of_their_own(graph, monkeypatch):
    """Of our operations, whose results are no views. What is only elsewhere in a vector of scales makes no difference."""
    ops, x = torch.ops.lowering, named(graph)["primals_1"]
    cursor = Cursor.start(graph)
    scales = cursor.call(aten.full.default, [7], 1.0)
    nodes = [cursor.call(ops.cast.default, [x], [scales], torch.float8_e4m3fn, scales_index=[i]) for i in (0, 5)]
    assert len(cursor.at(named(graph)["add"], True).results) == 1, "all places of a graph know it"
    first, second = ([cursor.item(node, i).meta["val"] for i in range(1)] for node in nodes)
    for a, b in zip(first, second, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.fake_mode) == (b.shape, b.stride(), b.dtype, b.fake_mode)
        assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    others = [cursor.call(ops.cast.default, [x], [scales], dtype, scales_index=[0]) for dtype in (torch.float8_e5m2,)]
    assert others[0].meta["val"][0].dtype == torch.float8_e5m2
    cursor.call(aten.neg.default, x)
    assert len(cursor.results) == 2, "torch's own operations may return views"


def test_an_inference_graph_has_no_sides(graph):
    graph.output_node().args = (named(graph)["relu"],)
    graph.erase_node(named(graph)["add"])
    graph.erase_node(named(graph)["tangents_1"])
    node = Cursor.start(graph).call(aten.neg.default, named(graph)["primals_1"])
    assert "partitioner_tag" not in node.meta
    module.pin(node, backward=False)
    assert not module.is_pinned(node)


def test_recomputation_is_shared_with_the_first_node_that_is_recomputed(graph):
    """And items are recomputed with their operation."""
    nodes, cursor = named(graph), Cursor.start(graph)
    nodes["add"].meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 3}
    nodes["relu"].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    shared = cursor.sharing(nodes["relu"], nodes["primals_1"], nodes["add"])
    items = shared.items(shared.call(aten.split.Tensor, nodes["primals_1"], 2))
    assert [tuple(n.meta["val"].shape) for n in items] == [(2, 6), (2, 6)]
    for node in (items[0].args[0], *items):
        assert (node.meta["recompute"], node.meta["ac_graph_id"]) == (CheckpointPolicy.PREFER_RECOMPUTE, 3)
    assert "recompute" not in cursor.sharing(nodes["relu"]).call(aten.neg.default, nodes["primals_1"]).meta


def test_sizes():
    graph = make_fx(lambda x, y: (x @ y, x * 2), tracing_mode="symbolic")(torch.randn(4, 6), torch.randn(6, 8)).graph
    x = next(iter(graph.nodes))
    cursor = Cursor.start(graph)
    size = cursor.size(x, -1)
    assert (size.target, size.args) == (aten.sym_size.int, (x, 1))
    assert size.meta["val"] == x.meta["val"].shape[1]
    vector = cursor.call(aten.new_zeros.default, x, [3])
    assert cursor.size(vector, -1) == 3


def test_nodes_that_may_share_an_operation(graph):
    """Equal: same side, same policy, same region of checkpointing."""
    nodes = named(graph)
    first, second = nodes["relu"], nodes["add"]
    for node in (first, second):
        node.meta |= {"partitioner_tag": "is_forward", "recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 1}
    assert module.recomputation_of(first) == module.recomputation_of(second)
    for key, value in (("partitioner_tag", "is_backward"), ("recompute", CheckpointPolicy.PREFER_SAVE), ("ac_graph_id", 2)):
        old, second.meta[key] = second.meta[key], value
        assert module.recomputation_of(first) != module.recomputation_of(second)
        second.meta[key] = old
