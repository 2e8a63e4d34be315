"""Graphs that others trace and own: make_fx's traces of a whole step, and AOTAutograd's joint graphs."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from fp8pass import fp8_compile, inspect, rewrite_graph, state
from fp8pass.errors import CheckpointMismatchError, OptionError
from fp8pass.graph import traces
from fp8pass.graph.gemms import is_scaled_gemm
from tests.support.models import Decoder, mlp
from tests.support.training import same

VOCABULARY, TOKENS = 64, 16


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def batch(step=0):
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(step))


def traced(model, loss=loss_of, example=None, mode="fake"):
    """Forward, loss and gradients by make_fx, on the Parameters and a batch, and the names of the Parameters."""
    names = [name for name, _ in model.named_parameters()]

    def step(*args):
        parameters = dict(zip(names, args, strict=False))
        value = loss(lambda *a: torch.func.functional_call(model, parameters, a), args[-1])
        return [value, *torch.autograd.grad(value, list(parameters.values()))]

    arguments = [p.detach().requires_grad_() for p in model.parameters()]
    with preserve_node_meta():
        graph = make_fx(step, tracing_mode=mode)(*arguments, batch() if example is None else example)
    # What autograd's engine ran is flagged, as by torchtitan's tracer: everything behind the one of the loss.
    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    (one,) = (i for i, n in enumerate(nodes) if n.target is torch.ops.aten.ones_like.default)
    for node in nodes[one + 1 :]:
        node.meta[traces.FLAG] = True
    return graph, names


def run(rewritten, model, argument):
    with torch.no_grad():
        return rewritten(*model.parameters(), argument)


def reference(compiled, model, argument, loss=loss_of):
    model.zero_grad()
    value = loss(compiled, argument)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


def square(f, x):
    return f(x).square().mean()


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_trace_equals_fp8_compile_bit_for_bit_over_steps(recipe):
    model = Decoder(1)
    graph, names = traced(model)
    code, rewritten = graph.code, rewrite_graph(graph, recipe, inputs=names)
    assert graph.code == code, "the given graph is not changed"
    gemms = [n for n in rewritten.graph.graph.nodes if is_scaled_gemm(n)]
    assert [bool(n.meta.get(traces.FLAG)) for n in gemms] == [False] * 7 + [True] * 14
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3 if recipe == "delayed" else 2):
        assert same(run(rewritten, model, batch(step)), reference(compiled, model, batch(step)))
        optimizer.step()
        assert rewritten.is_first_step == (recipe == "delayed" and step == 0)
        rewritten.state.step()
    assert rewritten.state_names == (["fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_slots"] if recipe == "delayed" else [])
    ours, theirs = rewritten.inspect(), inspect(compiled)
    keys = [sorted((g.module, g.role, str(g.reason).split(":")[0], g.m, g.n, g.k) for g in r.gemms) for r in (ours, theirs)]
    assert keys[0] == keys[1]
    assert ours.cache["graph_0"].startswith("bypassed: rewrite_graph rewrites the graph at each start")


def test_names_are_those_of_annotations_then_of_parameters_then_matmul_and_rules_choose_by_them():
    class Annotated(nn.Linear):
        def forward(self, x):
            with annotate({"module_fqn": "by.annotation"}):
                return super().forward(x)

    x = torch.randn(16, 32)
    graph, names = traced(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), Annotated(32, 32)), square, x)
    found = rewrite_graph(graph, "current", inputs=names, select="all", rules={"0:grad_weight": None}).inspect()
    assert {(g.module, g.role) for g in found.gemms if not g.quantized} == {("0", "grad_weight")}
    assert {g.module for g in found.gemms} == {"0", "by.annotation"}
    unnamed = rewrite_graph(graph, "current", select="all").inspect()
    assert {g.module for g in unnamed.gemms if g.role == "output"} == {"matmul", "by.annotation"}


def test_a_run_continues_from_its_state_and_from_that_of_a_compiled_model():
    model = Decoder(1)
    graph, names = traced(model)
    first = rewrite_graph(graph, "delayed", inputs=names)
    compiled = fp8_compile(model, "delayed", backend="aot_eager")
    run(first, model, batch())
    reference(compiled, model, batch())
    for view in (first.state, state(compiled)):
        view.step()
    ours, theirs = first.state.state_dict(), state(compiled).state_dict()
    assert theirs.pop("model") is not None  # its modules, which a graph does not have
    assert all(ours[key].equal(theirs[key]) for key in theirs)  # linears that read one input have histories of their own
    expected = run(first, model, batch(1))
    for saved in (first.state.state_dict(), state(compiled).state_dict()):
        second = rewrite_graph(graph, "delayed", inputs=names)
        second.state.load_state_dict(saved)
        assert same(run(second, model, batch(1)), expected)
    with pytest.raises(CheckpointMismatchError):
        rewrite_graph(graph, "current", inputs=names).state.load_state_dict(first.state.state_dict())


def test_a_joint_graph_is_named_by_its_descriptors_and_can_be_partitioned():
    model, x, tangent = mlp(32, 64, 32), torch.randn(32, 32), torch.randn(32, 32)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, (x,)).graph_module
        rewritten = rewrite_graph(joint, "delayed", select="all")
        graph = rewritten.first_step or rewritten.graph
        examples = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
        forward, backward = min_cut_rematerialization_partition(graph, examples, num_fwd_outputs=1)
    y = fp8_compile(model, "delayed", backend="aot_eager", select="all")(x)
    y.backward(tangent)
    expected = [y.detach(), *(p.grad for p in model.parameters())]
    parameters = [p.detach() for p in model.parameters()]
    assert same(rewritten(*parameters, x, tangent)[:-1], expected)  # the last one is that of x, None
    assert {g.module for g in rewritten.inspect().gemms if g.quantized} == {"0", "2"}
    with torch.no_grad():
        y, *saved = forward(*parameters, x, *rewritten.state_tensors())
        assert same([y, *backward(*saved, tangent)[: len(parameters)]], expected)


def refused(graph, match, **options):
    with pytest.raises(OptionError, match=match):
        rewrite_graph(graph, "current", **options)


def test_what_is_no_trace_of_aten_operations_is_refused():
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(16, 32)
    refused(model, "graph is a Sequential; pass the torch.fx.GraphModule")
    refused(fx.symbolic_trace(model), "which is not an ATen operation; trace with torch.fx.experimental.proxy_tensor.make_fx")
    refused(traced(model, square, x, mode="real")[0], "tracing_mode='fake'")
    graph, names = traced(model, square, x)
    refused(graph, r"inputs has 5 names, and the graph 3 inputs; remove a, b", inputs=[*names, None, "a", "b"])
    refused(graph, "inputs holds 'weight'; use names", inputs="weight")


def test_memory_that_a_gemm_reads_may_not_change_in_place():
    def changed(w, x):
        y = x @ w
        return y @ y.T, y.add_(1) @ y.T

    trace = make_fx(changed, tracing_mode="fake")(torch.randn(32, 32), torch.randn(16, 32))
    refused(trace, r"add_.* changes memory in place that mm_1 reads; trace\s+torch\.func\.functionalize", inputs=["w"])


def test_a_trace_that_returns_gradients_alone_records_amaxes():
    """Its loss is no output, and a user's ones of a scalar are no beginning of the backward."""

    def step(w, x):
        return torch.autograd.grad(2 * (x @ w).square().mean() * torch.ones_like(x.sum()), w)

    w, x = torch.randn(32, 32, requires_grad=True), torch.randn(16, 32)
    rewritten = rewrite_graph(make_fx(step, tracing_mode="fake")(w, x), "delayed", inputs=["proj.weight"])
    assert [(g.module, g.role) for g in rewritten.inspect().gemms] == [("proj", "output"), ("proj", "grad_weight")]
    rewritten(w, x)
    rewritten.state.step()
    assert rewritten.state.scale("proj:weight") == torch.tensor(448.0) / w.detach().abs().max()
    assert rewritten.state.scale("proj:grad_output") != 1
