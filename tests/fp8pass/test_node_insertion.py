"""The cursor: values, origin, side of the partition and recomputation of the nodes that it inserts."""

import operator

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


def test_the_start_is_the_first_operation(graph):
    start = Cursor.start(graph)
    assert start.before is named(graph)["relu"]
    assert start.is_joint
    assert not start.backward
    assert start.fake_mode is named(graph)["primals_1"].meta["val"].fake_mode


def test_a_graph_without_operations_starts_at_its_output():
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    start = Cursor.start(graph)
    assert start.before.op == "output"
    assert not start.is_joint


def test_a_new_node_has_a_value_an_origin_and_a_side(graph):
    relu = named(graph)["relu"]
    node = Cursor.start(graph).call(aten.sum.dim_IntList, named(graph)["primals_1"], [1], keepdim=True)
    assert node.next is relu
    assert (node.args, node.kwargs) == ((named(graph)["primals_1"], [1]), {"keepdim": True})
    assert tuple(node.meta["val"].shape) == (4, 1)
    assert set(node.meta) == {"val", "stack_trace", "seq_nr", "nn_module_stack", "partitioner_tag"}
    assert [node.meta[key] for key in ("stack_trace", "seq_nr", "partitioner_tag")] == ["line", 7, "is_forward"]


def test_another_place(graph):
    nodes = named(graph)
    nodes["relu"].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    cursor = Cursor.start(graph).sharing(nodes["relu"]).at(nodes["add"], backward=True)
    node = cursor.call(aten.neg.default, nodes["relu"])
    assert node.next is nodes["add"]
    assert node.meta["partitioner_tag"] == "is_backward"
    assert set(node.meta) == {"val", "partitioner_tag"}, "the origin of `add`, which has none, and no recomputation"


def test_an_inference_graph_has_no_sides(graph):
    graph.output_node().args = (named(graph)["relu"],)
    graph.erase_node(named(graph)["add"])
    graph.erase_node(named(graph)["tangents_1"])
    node = Cursor.start(graph).call(aten.neg.default, named(graph)["primals_1"])
    assert "partitioner_tag" not in node.meta
    module.pin(node, backward=False)
    assert not module.is_pinned(node)


def test_recomputation_is_shared_with_the_first_node_that_is_recomputed(graph):
    nodes = named(graph)
    nodes["add"].meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 3}
    nodes["relu"].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    cursor = Cursor.start(graph)
    shared = cursor.sharing(nodes["relu"], nodes["primals_1"], nodes["add"]).call(aten.neg.default, nodes["primals_1"])
    assert (shared.meta["recompute"], shared.meta["ac_graph_id"]) == (CheckpointPolicy.PREFER_RECOMPUTE, 3)
    assert module.is_recomputed(shared)
    alone = cursor.sharing(nodes["relu"]).call(aten.neg.default, nodes["primals_1"])
    assert "recompute" not in alone.meta


def test_items_are_recomputed_with_their_operation(graph):
    nodes = named(graph)
    nodes["add"].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    cursor = Cursor.start(graph)
    both = cursor.sharing(nodes["add"]).call(aten.split.Tensor, nodes["primals_1"], 2)
    items = cursor.items(both)
    assert [(n.target, n.args) for n in items] == [(operator.getitem, (both, 0)), (operator.getitem, (both, 1))]
    assert [tuple(n.meta["val"].shape) for n in items] == [(2, 6), (2, 6)]
    assert all(n.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for n in items)
    assert cursor.items(nodes["relu"]) == [nodes["relu"]]


def test_sizes():
    graph = make_fx(lambda x, y: (x @ y, x * 2), tracing_mode="symbolic")(torch.randn(4, 6), torch.randn(6, 8)).graph
    x = next(iter(graph.nodes))
    cursor = Cursor.start(graph)
    size = cursor.size(x, -1)
    assert (size.target, size.args) == (aten.sym_size.int, (x, 1))
    assert size.meta["val"] == x.meta["val"].shape[1]
    vector = cursor.call(aten.new_zeros.default, x, [3])
    assert cursor.size(vector, -1) == 3


@pytest.mark.parametrize(
    ("policy", "is_recomputed"),
    [
        (CheckpointPolicy.MUST_RECOMPUTE, True),
        (CheckpointPolicy.PREFER_RECOMPUTE, True),
        (CheckpointPolicy.MUST_SAVE, False),
        (CheckpointPolicy.PREFER_SAVE, False),
        (None, False),
    ],
)
def test_what_counts_as_recomputed(graph, policy, is_recomputed):
    relu = named(graph)["relu"]
    relu.meta["recompute"] = policy
    assert module.is_recomputed(relu) == is_recomputed


def test_policies(graph):
    nodes = named(graph)
    module.never_recompute(nodes["relu"], nodes["add"])
    assert {nodes[n].meta["recompute"] for n in ("relu", "add")} == {CheckpointPolicy.MUST_SAVE}
    module.always_recompute(nodes["relu"])
    assert nodes["relu"].meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    assert nodes["add"].meta["recompute"] is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize(("backward", "tag"), [(False, "must_be_in_forward"), (True, "must_be_in_backward")])
def test_pins(graph, backward, tag):
    cursor = Cursor.start(graph).at(named(graph)["add"], backward)
    node = cursor.call(aten.neg.default, named(graph)["primals_1"])
    assert not module.is_pinned(node)
    module.pin(node, backward)
    assert node.meta["partitioner_tag"] == tag
    assert module.is_pinned(node)


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
