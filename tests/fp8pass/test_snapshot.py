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


def test_it_keeps_no_node_alive():
    graph = trace(mlp(), torch.randn(16, 64), recipe="current").graph
    snapshot = Snapshot.take(graph)
    gc.collect()
    own = {id(o) for o in gc.get_referents(*snapshot.nodes) if gc.is_tracked(o)}
    assert not any(isinstance(o, fx.Node) for n in snapshot.nodes for o in gc.get_referents(n.args, n.kwargs, n.meta))
    assert len(own) < 4 * len(graph.nodes), "few objects of its own"


def test_arguments_of_every_kind_and_later_changes_of_the_graph():
    """Every place in which a node can stand: lists, tuples, dicts, slices and keyword arguments; and numbers beside nodes."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(torch.cat, ([x, y],), {"dim": 1})
    size = graph.call_method("size", (both, 1))
    part = graph.call_function(torch.Tensor.__getitem__, (both, (slice(None, size, None), 0)))
    graph.output({"part": part, "numbers": (0, 1, [2, True])}, type_expr=dict)
    before, snapshot = lines(graph), Snapshot.take(graph)
    copy = snapshot.restore()
    assert lines(copy) == before
    assert copy.output_node().type is dict
    given = torch.randn(3, 2), torch.randn(3, 1)
    found, wanted = (fx.Interpreter(fx.GraphModule({}, g)).run(*given) for g in (copy, graph))
    assert found["part"].equal(wanted["part"])
    assert found["numbers"] == wanted["numbers"] == (0, 1, [2, True])
    assert not set(copy.nodes) & set(graph.nodes)
    x.meta["later"] = True
    both.update_arg(0, [x])
    restored = snapshot.restore()
    assert lines(restored) == before != lines(graph)
    assert "later" not in next(iter(restored.nodes)).meta
