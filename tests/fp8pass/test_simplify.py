"""Simplifications: SiLU shares the sigmoid of its gradient, and elements of vectors that our operations read become vectors and
positions. Where they are found, that nothing else is touched, and with the same results."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import fp8_compile, inspect, rewrite_graph, state
from fp8pass.rewrite.runner import without
from fp8pass.rewrite.simplify import fold_elements, share_sigmoids, shared_sigmoids
from tests.support.cases import each
from tests.support.joint import calls
from tests.support.models import LlamaBlock, Net
from tests.support.training import assert_equal, compiled_step, same

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.lowering
E4M3 = torch.float8_e4m3fn


def silu(x):
    return x / (1 + torch.exp(-x))


def wide(x):
    return prims.convert_element_type.default(x, torch.float32)


#: Program, and the number of its nodes that can share a sigmoid.
PROGRAMS = [
    (lambda x: silu(x) + torch.sigmoid(x), 1),
    (lambda x: silu(x) + silu(2 * x) + torch.sigmoid(x), 1),
    (lambda x: silu(x) + 1 / (1 + torch.exp(-x)), 2),
    (lambda x: silu(x) + silu(2 * x) + torch.reciprocal(1 + torch.exp(-x)), 2),
    (lambda x: silu(wide(x)) + torch.sigmoid(wide(x)), 1),
    (lambda x: silu(x), 0),
    (lambda x: torch.reciprocal(1 + torch.exp(-x)), 0),
    (lambda x: silu(x) + torch.sigmoid(-x), 0),
    (lambda x: x / (2 + torch.exp(-x)) + torch.sigmoid(x), 0),
    (lambda x: x / (1 + torch.exp(x)) + torch.sigmoid(x), 0),
    (lambda x: (2 * x) / (1 + torch.exp(-x)) + torch.sigmoid(x), 0),
    (lambda x: x / (1 + torch.exp2(-x)) + torch.sigmoid(x), 0),
    (lambda x: x / torch.add(torch.exp(-x), 1, alpha=2) + torch.sigmoid(x), 0),
]


@each(("program", "count"), PROGRAMS)
def test_silus_whose_sigmoid_is_there(program, count):
    x = torch.linspace(-30, 30, 301, dtype=torch.bfloat16 if "wide" in program.__code__.co_names else torch.float32)
    traced = make_fx(program, tracing_mode="fake")(x)
    nodes, expected = shared_sigmoids(traced.graph), traced(x)
    assert len(nodes) == count
    share_sigmoids(traced.graph, nodes)
    traced.recompile()
    torch.testing.assert_close(traced(x), expected, rtol=1e-6, atol=0)
    assert not shared_sigmoids(traced.graph)


@pytest.mark.parametrize("rules", [None, {"*": None}])
def test_a_model_whose_activation_feeds_fp8(rules):
    """Inductor decomposes SiLU; where nothing is rewritten nothing is shared."""
    layers = {name: nn.Linear(64, 64, bias=False) for name in ("gate", "up", "down")}
    model, x = Net(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **layers), torch.randn(32, 64)

    def trained(*left_out):
        with without(*left_out):
            compiled, made = compiled_step(model, "current", x, backend="inductor", rules=rules, select="all")
        graph = inspect(compiled).graphs[0].after.graph
        return made.gradients, (len(calls(graph, aten.exp.default)), len(calls(graph, aten.sigmoid.default)))

    (ours, shared), (theirs, alone) = trained(), trained("share sigmoids")
    assert alone in ((1, 1), (2, 0)), "torch before 2.13 spells the gradient's sigmoid out"
    assert shared == ((0, 2) if rules is None else alone)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


# -- batches that are multiplied by one weight


class Strided(nn.Module):
    """Linears whose inputs are no views of matrices, the second one of a transposed weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Parameter(torch.randn(96, 64) / 10)

    def forward(self, x):
        return self.up(x.transpose(0, 1)).relu()[:, 1:] @ self.down


@pytest.mark.parametrize(
    ("recipe", "rules", "dynamic"), [("delayed", None, True), ("blockwise", None, None), ("rowwise", {"up": None}, True)]
)
def test_a_frozen_weight_of_strided_rows_is_one_weight(recipe, rules, dynamic):
    """Outputs, gradients and scales are as where it is trained."""
    trained = Strided()
    frozen = copy.deepcopy(trained).requires_grad_(False)
    made = []
    for model in (trained, frozen):
        compiled = fp8_compile(model, recipe, rules=rules, select="all", dynamic=dynamic, backend="aot_eager")
        for i in range(3):
            x = torch.randn(6 + i % 2, 16, 64, generator=torch.Generator().manual_seed(i)).requires_grad_()
            out = compiled(x)
            out.square().sum().backward()
            made.append((out, x.grad))
        made.append({name: state(compiled).scale(name) for name in state(compiled).tensors})
        assert not any(calls(graph.after.graph, aten.bmm.default) for graph in inspect(compiled).graphs)
    assert all(same(a, b) for a, b in zip(made[:4], made[4:], strict=True))


@pytest.mark.parametrize("rules", [None, {"w:grad_weight": None}])
def test_the_gradient_of_a_trained_weight_that_is_repeated_is_its_own(rules):
    """In a graph of make_fx, which tells nothing of it but its operands: in FP8, by its rule, and as `fp8_compile` has it."""
    up, w, x = nn.Linear(64, 64, bias=False), nn.Parameter(torch.randn(64, 96)), torch.randn(4, 32, 64)
    model = Net(lambda m, x: torch.bmm(m.up(x), m.w.expand(4, -1, -1)), up=up, w=w)
    names, given = ["up.weight", "w"], [up.weight, w, x]

    def step(up, w, x):
        loss = functional_call(model, {"up.weight": up, "w": w}, x).square().mean()
        return loss, *torch.autograd.grad(loss, [up, w])

    graph = make_fx(step, tracing_mode="fake")(*[p.detach().requires_grad_() for p in given[:2]], x)
    rewritten = rewrite_graph(graph, "current", rules=rules, select="all", inputs=[*names, None])
    rows = {(g.role, g.quantized) for g in rewritten.inspect().gemms if g.module == "w"}
    assert rows == {("output", True), ("grad_input", True), ("grad_weight", rules is None)}
    with torch.no_grad():
        found = rewritten(*given)
    compiled = fp8_compile(model, "current", rules=rules, select="all", backend="aot_eager")
    loss = compiled(x).square().mean()
    loss.backward()
    assert same(tuple(found), (loss.detach(), up.weight.grad, w.grad))


def test_in_high_precision_its_product_is_torchs():
    model, x = Strided().requires_grad_(False), torch.randn(6, 16, 64)
    torch.testing.assert_close(fp8_compile(model, rules={"*": None}, backend="aot_eager")(x), model(x))


# -- elements of vectors


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
