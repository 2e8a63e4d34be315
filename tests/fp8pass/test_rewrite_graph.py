"""Graphs that others trace and own: make_fx's traces of a whole step, and AOTAutograd's joint graphs."""

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, rewrite_graph, state
from fp8pass.errors import CheckpointMismatchError, OptionError, RecipeError
from fp8pass.graph import traces
from tests.support.cases import rest
from tests.support.models import Decoder, mlp

RECIPES = ["delayed", "current", "blockwise", "rowwise", "mxfp8"]
VOCABULARY, TOKENS = 64, 16


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def batch(step=0):
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(step))


def traced(model, loss=loss_of, example=None, flagged=True, mode="fake"):
    """Forward, loss and gradients by make_fx, on the Parameters and a batch, and the names of the Parameters."""
    names = [name for name, _ in model.named_parameters()]

    def step(*args):
        parameters = dict(zip(names, args, strict=False))
        value = loss(lambda *a: torch.func.functional_call(model, parameters, a), args[-1])
        return [value, *torch.autograd.grad(value, list(parameters.values()))]

    arguments = [p.detach().requires_grad_() for p in model.parameters()]
    with preserve_node_meta():
        graph = make_fx(step, tracing_mode=mode)(*arguments, batch() if example is None else example)
    if flagged:
        flag(graph)
    return graph, names


def flag(graph):
    """Flag what autograd's engine ran, as torchtitan's tracer does: everything behind the one of the loss."""
    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    (one,) = (i for i, n in enumerate(nodes) if n.target is torch.ops.aten.ones_like.default)
    for node in nodes[one + 1 :]:
        node.meta[traces.FLAG] = True


def run(rewritten, model, argument):
    with torch.no_grad():
        return rewritten(*model.parameters(), argument)


def reference(compiled, model, argument, loss=loss_of):
    model.zero_grad()
    value = loss(compiled, argument)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


def assert_equal(left, right):
    assert all(a.equal(b) for a, b in zip(left, right, strict=True))


def square(f, x):
    return f(x).square().mean()


@pytest.mark.parametrize("recipe", [*RECIPES[::2], *rest(RECIPES[1::2])])
def test_a_trace_equals_fp8_compile_bit_for_bit_over_steps(recipe):
    model = Decoder(1)
    graph, names = traced(model)
    rewritten = rewrite_graph(graph, recipe, inputs=names)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3 if recipe == "delayed" else 2):
        found = run(rewritten, model, batch(step))
        assert_equal(found, reference(compiled, model, batch(step)))
        optimizer.step()
        rewritten.state.step()
    ours, theirs = rewritten.inspect(), inspect(compiled)
    keys = [
        sorted((g.module, g.role, g.quantized, (g.reason or "").split(":")[0], g.m, g.n, g.k) for g in found.gemms)
        for found in (ours, theirs)
    ]
    assert keys[0] == keys[1]
    assert sum(g.quantized for g in ours.gemms) == 7 * 3
    assert ours.cache["graph_0"].startswith("bypassed: rewrite_graph rewrites the graph at each start")


def test_a_trace_without_flags_is_the_same():
    """make_fx leaves `autograd_backward` on nodes only for those who ask for it."""
    model = Decoder(1)
    found = []
    for flagged in (True, False):
        graph, names = traced(model, flagged=flagged)
        assert any(n.meta.get(traces.FLAG) for n in graph.graph.nodes) == flagged
        found.append(run(rewrite_graph(graph, "current", inputs=names), model, batch()))
    assert_equal(*found)


def test_the_given_graph_is_not_changed_and_the_new_one_has_no_gemm_left_to_rewrite():
    model = Decoder(1)
    graph, names = traced(model)
    code, expected = graph.code, run(graph, model, batch())
    rewritten = rewrite_graph(graph, "delayed", inputs=names)
    assert graph.code == code
    assert_equal(run(graph, model, batch()), expected)
    nodes = list(rewritten.graph.graph.nodes)
    assert not any("partitioner_tag" in n.meta for n in nodes)
    gemms = [n for n in nodes if n.target is torch.ops.lowering.scaled_mm.default]
    assert [bool(n.meta.get(traces.FLAG)) for n in gemms] == [False] * 7 + [True] * 14
    again = rewrite_graph(graph, "delayed", inputs=names)
    assert again.graph.code == rewritten.graph.code
    model = Decoder(1)
    graph, names = traced(model)
    once = rewrite_graph(graph, "current", inputs=names, select="all")
    twice = rewrite_graph(once.graph, "current", inputs=names, select="all")
    assert [g for g in twice.inspect().gemms if g.quantized] == []
    assert_equal(run(once, model, batch()), run(twice, model, batch()))


# -- names


def test_names_are_those_of_annotations_then_of_parameters_then_matmul():
    class Annotated(nn.Linear):
        def forward(self, x):
            with annotate({"module_fqn": "by.annotation"}):
                return super().forward(x)

    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), Annotated(32, 32))
    graph, names = traced(model, square, torch.randn(16, 32))
    named = rewrite_graph(graph, "current", inputs=names, select="all")
    assert {g.module for g in named.inspect().gemms} == {"0", "by.annotation"}
    assert "by.annotation" in {g.module for g in named.inspect().gemms if g.role == "output"}
    unnamed = rewrite_graph(graph, "current", select="all")
    assert "matmul" in {g.module for g in unnamed.inspect().gemms if g.role == "output"}
    x = torch.randn(16, 32)
    assert_equal(run(unnamed, model, x), run(named, model, x))


def test_rules_and_selection_are_those_of_fp8_compile():
    graph, names = traced(Decoder(1))
    found = rewrite_graph(graph, "current", inputs=names, rules={"layers.*.up:grad_weight": None}).inspect()
    kept = {(g.module, g.role): g.reason.split(":")[0] for g in found.gemms if not g.quantized}
    heads = {("head", role): "head" for role in ("output", "grad_input", "grad_weight")}
    assert kept == {("layers.0.up", "grad_weight"): "rule", **heads}
    assert found.unmatched_rules == []
    with pytest.raises(RecipeError, match="Did you mean 'delayed'"):
        rewrite_graph(graph, "delaid")


# -- state


def test_state_enters_as_inputs_and_changes_only_when_a_step_ends():
    model = Decoder(1)
    graph, names = traced(model)
    rewritten = rewrite_graph(graph, DelayedScaling(amax_history_len=4), inputs=names)
    added = [str(n.target) for n in rewritten.graph.graph.find_nodes(op="placeholder")][len(names) + 1 :]
    assert rewritten.state_names == added == ["fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_slots"]
    assert rewritten.is_first_step
    for _ in range(2):  # gradient accumulation: both calls belong to the first step
        run(rewritten, model, batch())
        assert rewritten.is_first_step
    assert float(rewritten.state.scale("layers.0.up:weight")) == 1
    rewritten.state.step()
    assert not rewritten.is_first_step
    amax = model.layers[0].up.weight.detach().abs().max()
    assert rewritten.state.amax_history("layers.0.up:weight")[-1] == amax
    scale = rewritten.state.scale("layers.0.up:weight")
    assert float(scale) == pytest.approx(float(448 / amax), rel=1e-6)
    by_hand = rewritten.graph(*(p.detach() for p in model.parameters()), batch(), *rewritten.state_tensors())
    assert_equal(by_hand, run(rewritten, model, batch()))
    assert rewritten.state.scale("layers.0.up:weight") == scale


def test_a_recipe_without_state_and_a_forward_alone():
    graph, names = traced(Decoder(1))
    rewritten = rewrite_graph(graph, "current", inputs=names)
    assert (rewritten.state_names, rewritten.state_tensors(), rewritten.first_step) == ([], [], None)
    assert not rewritten.is_first_step
    rewritten.state.step()
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    graph = make_fx(lambda w, x: F.linear(x, w), tracing_mode="fake")(model[0].weight, torch.randn(16, 32))
    rewritten = rewrite_graph(graph, DelayedScaling(initial_scale="one"), inputs=["0.weight"])
    assert rewritten.first_step is None
    weight, x = model[0].weight.detach(), torch.randn(16, 32)
    with torch.no_grad():
        expected = fp8_compile(model, DelayedScaling(initial_scale="one"), backend="aot_eager")(x)
    assert rewritten(weight, x).equal(expected)
    rewritten.state.step()
    assert not rewritten.state.amax_history("0:input").any()


def test_a_graph_with_more_tensors_than_a_new_store_holds():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(23)))
    graph, names = traced(model, square, torch.randn(16, 32))
    rewritten = rewrite_graph(graph, "delayed", inputs=names, select="all")
    compiled = fp8_compile(model, "delayed", backend="aot_eager", select="all")
    x = torch.randn(16, 32)
    assert_equal(run(rewritten, model, x), reference(compiled, model, x, square))
    assert len(rewritten.state.tensors) == 69


def test_a_run_continues_from_its_state_and_from_that_of_a_compiled_model():
    model = Decoder(1)
    graph, names = traced(model)
    first = rewrite_graph(graph, "delayed", inputs=names)
    compiled = fp8_compile(model, "delayed", backend="aot_eager")
    for step in range(2):
        run(first, model, batch(step))
        first.state.step()
        reference(compiled, model, batch(step))
    state(compiled).step()
    ours, theirs = first.state.state_dict(), state(compiled).state_dict()
    assert theirs.pop("model") is not None  # its modules, which a graph does not have
    assert all(ours[key].equal(theirs[key]) for key in theirs)  # linears that read one input have histories of their own
    expected = run(first, model, batch(2))
    for saved in (first.state.state_dict(), state(compiled).state_dict()):
        second = rewrite_graph(graph, "delayed", inputs=names)
        second.state.load_state_dict(saved)
        assert not second.is_first_step
        assert_equal(run(second, model, batch(2)), expected)
    with pytest.raises(CheckpointMismatchError):
        rewrite_graph(graph, "current", inputs=names).state.load_state_dict(first.state.state_dict())


def test_the_state_of_another_graph_under_equal_rules_is_refused():
    one, other = mlp(32, 64, 32), nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    one, other = (
        rewrite_graph(graph, "delayed", inputs=names).state
        for graph, names in (traced(model, square, torch.randn(16, 32)) for model in (one, other))
    )
    with pytest.raises(CheckpointMismatchError, match="missing"):
        other.load_state_dict(one.state_dict())


# -- AOTAutograd's joint graphs


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_joint_graph_is_named_by_its_descriptors_and_can_be_partitioned(recipe):
    model, x, tangent = mlp(32, 64, 32), torch.randn(32, 32), torch.randn(32, 32)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, (x,)).graph_module
        rewritten = rewrite_graph(joint, recipe, select="all")
        graph = rewritten.first_step or rewritten.graph
        examples = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
        forward, backward = min_cut_rematerialization_partition(graph, examples, num_fwd_outputs=1)
    y = fp8_compile(model, recipe, backend="aot_eager", select="all")(x)
    y.backward(tangent)
    expected = [y.detach(), *(p.grad for p in model.parameters())]
    parameters = [p.detach() for p in model.parameters()]
    assert_equal(rewritten(*parameters, x, tangent)[:-1], expected)  # the last one is that of x, None
    names = [f"{g.module}:{g.role}" for g in rewritten.inspect().gemms if g.quantized]
    assert names == ["0:output", "2:output", "2:grad_input", "2:grad_weight", "0:grad_weight"]
    with torch.no_grad():
        y, *saved = forward(*parameters, x, *rewritten.state_tensors())
        assert_equal([y, *backward(*saved, tangent)[: len(parameters)]], expected)


# -- what is refused


def refused(graph, match, **options):
    with pytest.raises(OptionError, match=match):
        rewrite_graph(graph, "current", **options)


def test_what_is_no_trace_of_aten_operations_is_refused():
    model = nn.Sequential(nn.Linear(32, 32))
    refused(model, "graph is a Sequential; pass the torch.fx.GraphModule")
    refused(fx.symbolic_trace(model), "which is not an ATen operation; trace with torch.fx.experimental.proxy_tensor.make_fx")
    real, _ = traced(model, square, torch.randn(16, 32), mode="real")
    refused(real, "tracing_mode='fake'")
    graph, names = traced(model, square, torch.randn(16, 32))
    refused(graph, r"inputs has 5 names, and the graph 3 inputs; remove a, b", inputs=[*names, None, "a", "b"])
    refused(graph, "inputs holds 'weight'; use names", inputs="weight")
    refused(graph, "inputs holds 1; use names", inputs=[1])
    nested = torch.export.export(model, (torch.randn(16, 32),)).module()
    refused(nested, "_PyTreeCodeGen")


def test_memory_that_a_gemm_reads_may_not_change_in_place():
    def changed(f, x):
        y = f(x)
        z = y @ y.T
        y.add_(1)
        return z.square().mean() + (y @ y.T).square().mean()

    model = nn.Sequential(nn.Linear(32, 32))
    names = ["0.weight", "0.bias"]
    fake = make_fx(lambda w, b, x: changed(lambda x: F.linear(x, w, b), x), tracing_mode="fake")(
        *model.parameters(), torch.randn(16, 32)
    )
    refused(fake, r"add_.* changes memory in place that mm reads; trace\s+torch\.func\.functionalize", inputs=names)
    harmless = make_fx(lambda w, x: (x @ w.T, torch.zeros(3).add_(1)), tracing_mode="fake")(
        torch.randn(32, 32), torch.randn(16, 32)
    )
    result, _ = rewrite_graph(harmless, Float8CurrentScaling(), inputs=["w"])(torch.randn(32, 32), torch.randn(16, 32))
    assert result.shape == (16, 32)


@pytest.mark.parametrize("differentiate", [torch.autograd.grad, lambda loss, w: torch.autograd.grad(2 * loss, w)])
def test_a_trace_that_returns_gradients_alone_records_amaxes(differentiate):
    """Its loss is no output, and a user's ones of a scalar are no beginning of the backward."""

    def step(w, x):
        return differentiate((x @ w).square().mean() * torch.ones_like(x.sum()), w)

    w, x = torch.randn(32, 32, requires_grad=True), torch.randn(16, 32)
    rewritten = rewrite_graph(make_fx(step, tracing_mode="fake")(w, x), "delayed", inputs=["proj.weight"])
    assert [(g.module, g.role) for g in rewritten.inspect().gemms] == [("proj", "output"), ("proj", "grad_weight")]
    rewritten(w, x)
    rewritten.state.step()
    assert rewritten.state.scale("proj:weight") == torch.tensor(448.0) / w.detach().abs().max()
    assert rewritten.state.scale("proj:grad_output") != 1


def test_a_snapshot_has_arguments_of_every_kind_and_no_later_changes_of_the_graph():
    """Every place in which a node can stand: lists, tuples, dicts, slices and keyword arguments; and numbers beside nodes."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(torch.cat, ([x, y],), {"dim": 1})
    size = graph.call_method("size", (both, 1))
    part = graph.call_function(torch.Tensor.__getitem__, (both, (slice(None, size, None), 0)))
    graph.output({"part": part, "numbers": (0, 1, [2, True])}, type_expr=dict)
    x.meta["first"] = True
    before, snapshot = str(graph), traces.Snapshot.take(graph)
    held = [o for n in snapshot.nodes for o in gc.get_referents(n.args, n.kwargs, n.meta)]
    assert not any(isinstance(o, fx.Node) for o in held), "it keeps no node alive"
    copy = snapshot.restore()
    assert str(copy) == before
    assert copy.output_node().type is dict
    given = torch.randn(3, 2), torch.randn(3, 1)
    found, wanted = (fx.Interpreter(fx.GraphModule({}, g)).run(*given) for g in (copy, graph))
    assert found["part"].equal(wanted["part"])
    assert found["numbers"] == wanted["numbers"] == (0, 1, [2, True])
    assert not set(copy.nodes) & set(graph.nodes)
    x.meta["later"] = True
    both.update_arg(0, [x])
    restored = snapshot.restore()
    assert str(restored) == before != str(graph)
    assert next(iter(restored.nodes)).meta == {"first": True}
