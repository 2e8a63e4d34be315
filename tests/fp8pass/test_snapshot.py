"""Snapshots of graphs."""

import gc

import torch
from torch import fx

from fp8pass.graph.traces import Snapshot
from tests.support.joint import trace
from tests.support.models import mlp


def lines(graph):
    return str(graph).splitlines()


def test_every_node_returns_with_its_metadata():
    graph = trace(mlp(), torch.randn(16, 64), recipe="current").graph
    copy = Snapshot.take(graph).restore()
    copy.lint()
    assert lines(copy) == lines(graph)
    for ours, theirs in zip(copy.nodes, graph.nodes, strict=True):
        assert ours is not theirs
        assert ours.meta == theirs.meta
        assert ours.meta is not theirs.meta
    assert copy.output_node().meta["desc"] == graph.output_node().meta["desc"]


def all_kinds_of_arguments():
    """Every place in which a node can stand: lists, tuples, dicts, slices and keyword arguments; and numbers beside nodes."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(torch.cat, ([x, y],), {"dim": 1})
    size = graph.call_method("size", (both, 1))
    part = graph.call_function(torch.Tensor.__getitem__, (both, (slice(None, size, None), 0)))
    graph.output({"part": part, "numbers": (0, 1, [2, True])}, type_expr=dict)
    return graph


def test_arguments_of_every_kind():
    graph = all_kinds_of_arguments()
    copy = Snapshot.take(graph).restore()
    assert lines(copy) == lines(graph)
    assert copy.output_node().type is dict
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    found, wanted = (fx.Interpreter(fx.GraphModule({}, g)).run(x, y) for g in (copy, graph))
    assert found["part"].equal(wanted["part"])
    assert found["numbers"] == wanted["numbers"] == (0, 1, [2, True])
    assert not set(copy.nodes) & set(graph.nodes)


def test_later_changes_of_the_graph_do_not_reach_it():
    graph = all_kinds_of_arguments()
    before = lines(graph)
    snapshot = Snapshot.take(graph)
    first = next(iter(graph.nodes))
    first.meta["later"] = True
    graph.find_nodes(op="call_function", target=torch.cat)[0].update_arg(0, [first])
    restored = snapshot.restore()
    assert lines(restored) == before != lines(graph)
    assert "later" not in next(iter(restored.nodes)).meta


def test_it_keeps_no_node_alive():
    """And few objects of its own."""
    graph = trace(mlp(), torch.randn(16, 64), recipe="current").graph
    snapshot, count = Snapshot.take(graph), len(graph.nodes)
    gc.collect()
    own = {id(o) for o in gc.get_referents(*snapshot.nodes) if gc.is_tracked(o)}
    assert not any(isinstance(o, fx.Node) for n in snapshot.nodes for o in gc.get_referents(n.args, n.kwargs, n.meta))
    assert len(own) < 4 * count
