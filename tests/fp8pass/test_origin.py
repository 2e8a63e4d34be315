"""Origin: paths, source lines and descriptors in the forms that Dynamo and AOTAutograd leave on nodes."""

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as aot

from fp8pass.graph import origin
from fp8pass.graph.origin import Path, parse_path
from tests.support.joint import trace

SOURCES = {
    "L['self']": ("self", ""),
    "L['x']": ("x", ""),
    "G['model']": ("model", ""),
    "L['self']._modules['layers']._modules['0']._modules['wq']": ("self", "layers.0.wq"),
    "L['self']._modules['layers']._modules['0']._parameters['weight']": ("self", "layers.0.weight"),
    "L['self']._buffers['scale']": ("self", "scale"),
    "L['self'].layers[0].wq.weight": ("self", "layers.0.wq.weight"),
    "L['params'][\"a.b\"].weight": ("params", "a.b.weight"),
    "L['self'].__dict__['base']._modules['up'].weight": ("self", "base.up.weight"),
    "L['self'].forward._torchdynamo_inline.__self__._modules['up'].weight": ("self", "up.weight"),
    "L['self'].forward.__self__": ("self", ""),
    "L['batch']['x']": ("batch", "x"),
    "L['batch'][3]": ("batch", "3"),
    # With plain tensors in the places of Parameters.
    "getattr(G['model'].layers, '0')": ("model", "layers.0"),
    "getattr(getattr(L['self'].a, '0').b, '1')": ("self", "a.0.b.1"),
    "getattr(L['models'][0], '0').weight": ("models", "0.0.weight"),
    # An attribute of the user's that only begins like one of nn.Module's dictionaries stays.
    "L['self']._modules_of_mine.up": ("self", "_modules_of_mine.up"),
}


def test_paths():
    assert {source: parse_path(source) for source in SOURCES} == {source: Path(*path) for source, path in SOURCES.items()}
    assert [parse_path(s) for s in ("", "self.weight", "___from_numpy(L['x'])", "C['x']", "L[x]")] == [None] * 5
    assert (str(Path("self", "layers.0")), str(Path("self", ""))) == ("self.layers.0", "self")


def node_with(**meta):
    node = fx.Graph().placeholder("x")
    node.meta.update(meta)
    return node


def test_the_innermost_module_and_frame():
    outer, inner = ("L['self']", nn.Linear), ("L['self']._modules['up']", nn.Linear)
    assert origin.module_path(node_with(nn_module_stack={"1": outer, "2": inner})) == Path("self", "up")
    assert origin.module_path(node_with(nn_module_stack={"1": outer, "2": ("no path", nn.Linear)})) == Path("self", "")
    assert origin.module_path(node_with(fwd_nn_module_stack={"1": inner})) == Path("self", "up")
    assert origin.module_path(node_with(nn_module_stack={}, fwd_nn_module_stack={"1": inner})) == Path("self", "up")
    assert origin.module_path(node_with(nn_module_stack={"1": ("no path", nn.Linear)})) is None
    assert origin.module_path(node_with()) is None
    trace_ = '  File "/a/model.py", line 7, in forward\n    x = self.up(x)\n  File "/a/up b.py", line 12, in forward\n    ...'
    assert origin.source_line(node_with(stack_trace=trace_)) == "/a/up b.py:12"
    assert origin.source_line(node_with(stack_trace=None)) == ""
    assert origin.source_line(node_with()) == ""


PLAIN = aot.PlainAOTInput(3)
INPUTS = {
    "plain": (PLAIN, 3),
    "part of a subclass": (aot.SubclassGetAttrAOTInput(PLAIN, "_local_tensor"), 3),
    "part of a part": (aot.SubclassGetAttrAOTInput(aot.SubclassGetAttrAOTInput(PLAIN, "a"), "b"), 3),
    # These count something else than the inputs of Dynamo's graph.
    "size of a subclass": (aot.SubclassSizeAOTInput(PLAIN, 1), None),
    "stride of a subclass": (aot.SubclassStrideAOTInput(PLAIN, 0), None),
    "token of an effect": (aot.ForwardTokenAOTInput(0), None),
    "token of an effect in backward": (aot.BackwardTokenAOTInput(0), None),
    "tangent": (aot.TangentAOTInput(aot.PlainAOTOutput(0)), None),
    "part of a tangent": (aot.SubclassGetAttrAOTInput(aot.TangentAOTInput(aot.PlainAOTOutput(0)), "_local_tensor"), None),
    "seed": (aot.PhiloxForwardSeedAOTInput(), None),
    "nothing": (None, None),
}


OUTPUTS = {
    "gradient": (aot.GradAOTOutput(PLAIN), True),
    "gradient of an input that needs none": (None, True),
    "part of a gradient": (aot.SubclassGetAttrAOTOutput(aot.GradAOTOutput(PLAIN), "_local_tensor"), True),
    "output": (aot.PlainAOTOutput(0), False),
    "part of an output": (aot.SubclassGetAttrAOTOutput(aot.PlainAOTOutput(0), "_local_tensor"), False),
    "mutated input": (aot.InputMutationAOTOutput(PLAIN), False),
}


def test_positions_among_dynamos_inputs_and_gradients_among_the_outputs():
    found = {case: origin.input_index(node_with(desc=described)) for case, (described, _) in INPUTS.items()}
    assert found == {case: index for case, (_, index) in INPUTS.items()}
    found = {case: origin.is_gradient(described) for case, (described, _) in OUTPUTS.items()}
    assert found == {case: is_gradient for case, (_, is_gradient) in OUTPUTS.items()}


def test_a_joint_graph_as_torch_makes_it():
    """x is input 2 of Dynamo's graph: Parameters that the frame reads earlier come first."""
    model = nn.Linear(4, 6)
    graph = trace(model, torch.randn(3, 4), recipe="current").graph
    placeholders = graph.find_nodes(op="placeholder")
    shapes = [tuple(n.meta["val"].shape) for n in placeholders]
    assert sorted(shapes) == [(3, 4), (3, 6), (6,), (6, 4)]
    assert [origin.input_index(n) for n in placeholders] == [0, 1, 2, None]
    assert [origin.is_tangent(n) for n in placeholders] == [False, False, False, True]
    assert not origin.is_subgraph(graph)
    (output,) = graph.find_nodes(op="output")
    assert [origin.is_gradient(described) for described in output.meta["desc"]] == [False, True, True, True]
    del output.meta["desc"]
    assert origin.is_subgraph(graph)
    assert origin.input_index(node_with()) is None
    assert not origin.is_tangent(graph.call_function(torch.neg, (), {}, name="tangents_of_mine")), "no placeholder"
