"""Discovery: which operations multiply matrices and have an FP8 counterpart, whose they are, and what their operands are."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fp8pass import inspect
from fp8pass.graph import gemms
from tests.support.cases import each
from tests.support.joint import by_role, trace
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.training import fp8

aten = torch.ops.aten


def sites_of(model, *inputs, **options):
    return trace(model, *inputs, recipe="current", **options).run("discover").sites


def rows(sites):
    """(module, role) -> (m, n, k), (kind and orientation of the operands)."""
    return {
        (s.module, s.role): ((s.m, s.n, s.k), *(f"{o.kind}{'.T' if o.transposed else ''}" for o in s.operands)) for s in sites
    }


def test_linears():
    sites = sites_of(mlp(64, 128, 32), torch.randn(16, 64, requires_grad=True))
    assert rows(sites) == {
        ("0", "output"): ((16, 128, 64), "input", "weight.T"),
        ("2", "output"): ((16, 32, 128), "input", "weight.T"),
        ("2", "grad_input"): ((16, 128, 32), "grad_output", "weight"),
        ("2", "grad_weight"): ((32, 128, 16), "grad_output.T", "input"),
        ("0", "grad_input"): ((16, 64, 128), "grad_output", "weight"),
        ("0", "grad_weight"): ((128, 64, 16), "grad_output.T", "input"),
    }
    assert [s.is_backward for s in sites] == [False, False, True, True, True, True], "the forward's first"
    assert [s.op for s in sites] == ["addmm", "addmm", "mm", "mm", "mm", "mm"]
    assert [s.path.below for s in sites] == ["0", "2", "2", "2", "0", "0"]


def test_inference_and_gradients_that_are_not_wanted():
    sites = sites_of(mlp(), torch.randn(16, 64), trains=False)
    assert [(s.module, s.role, s.is_backward) for s in sites] == [("0", "output", False), ("2", "output", False)]
    model = mlp()
    model[2].weight.requires_grad_(False)
    roles = {(s.module, s.role) for s in sites_of(model, torch.randn(16, 64))}
    assert roles == {("0", "output"), ("0", "grad_weight"), ("2", "output"), ("2", "grad_input")}


@pytest.mark.parametrize("model", [mlp(), LlamaBlock()], ids=["mlp", "llama"])
def test_roles_are_found_without_seq_nr(model):
    x = torch.randn(16, 64) if isinstance(model, nn.Sequential) else torch.randn(1, 16, 128)
    joint = trace(model, x.requires_grad_(), recipe="current")
    named = {m for m, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = {(m, role) for m in named for role in ("output", "grad_input", "grad_weight")}
    assert set(by_role(joint.run("discover"))) == expected
    for node in joint.graph.nodes:
        node.meta.pop("seq_nr", None)
    assert set(by_role(joint.run("discover"))) == expected


def test_a_weight_on_the_left_and_two_activations():
    left = Net(lambda m, x: m.weight @ x, weight=nn.Parameter(torch.randn(32, 64)))
    assert rows(sites_of(left, torch.randn(64, 16, requires_grad=True))) == {
        ("self", "output"): ((32, 16, 64), "weight", "input"),
        ("self", "grad_input"): ((64, 16, 32), "weight.T", "grad_output"),
        ("self", "grad_weight"): ((32, 64, 16), "grad_output", "input.T"),
    }
    a, b = torch.randn(16, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    assert rows(sites_of(lambda a, b: a @ b, a, b)) == {
        ("matmul", "output"): ((16, 48, 32), "input", "input"),
        ("matmul", "grad_input"): ((16, 32, 48), "grad_output", "input.T"),
        ("matmul", "grad_weight"): ((32, 48, 16), "input.T", "grad_output"),
    }


def test_what_is_made_of_parameters_and_buffers_is_a_weight():
    x, weight = torch.randn(16, 32), nn.Parameter(torch.randn(48, 32))
    derived = Net(lambda m, x: F.linear(x, (m.weight * m.gain * m.mask).bfloat16().float()), weight=weight)
    derived.gain = nn.Parameter(torch.ones(48, 1))
    derived.register_buffer("mask", torch.ones(48, 32))

    def kinds(*args):
        return [o.kind for o in sites_of(*args)[0].operands]

    assert kinds(derived, x) == ["input", "weight"]
    assert kinds(lambda x, w: x @ (w.t() * x.mean()), x, weight) == ["input", "input"]
    assert kinds(lambda x, w: x @ w.t(), x, weight) == ["input", "weight"]


def test_a_functional_call_belongs_to_the_owner_of_its_weight():
    model = nn.MultiheadAttention(32, 2, bias=False, batch_first=True)
    x = torch.randn(2, 16, 32)
    sites = sites_of(lambda x: model(x, x, x, need_weights=False)[0], x)
    outputs = [s.module for s in sites if s.role == "output" and s.operands]
    assert outputs[-1].endswith("out_proj")
    assert not outputs[0].endswith("out_proj")


def test_modules_of_a_functional_call_have_their_names_in_containers_too():
    """Where it puts plain tensors for Parameters, Dynamo names modules whose names are numbers by calls of `getattr`."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.ReLU(), nn.Linear(48, 32)))
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    rules = {"model.0": None, "model.1.1": "blockwise"}
    compiled = fp8(lambda values, x: torch.func.functional_call(model, values, (x,)), "current", rules=rules)
    compiled(values, torch.randn(16, 32)).sum().backward()
    assert {(g.module, g.recipe) for g in inspect(compiled).gemms} == {("model.0", None), ("model.1.1", "blockwise")}


def test_names_of_tensors():
    """Of a module that is called twice, and shared ones, which have aliases."""
    layers = {"inner": nn.Linear(32, 32, bias=False), "head": nn.Linear(32, 48, bias=False)}
    twice = Net(lambda m, x: m.head(torch.tanh(m.inner(torch.tanh(m.inner(x))))), **layers)
    sites = sites_of(twice, torch.randn(16, 32))
    names, shared = gemms.name_tensors(list(sites))
    of_head = "head:input head:weight head:grad_output"
    expected = f"inner:input inner:weight inner:input#2 {of_head} inner:grad_output inner:grad_output#2"
    assert " ".join(map(str, names.values())) == expected
    assert shared == ()
    sites = sites_of(LlamaBlock(), torch.randn(1, 16, 128))
    names, shared = gemms.name_tensors(list(sites))
    aliases = {str(a): str(name) for a, name in shared}
    assert aliases == {"wk:input": "wq:input", "wv:input": "wq:input", "up:input": "gate:input"}
    assert len(names) == 4 + 7 + 7, "inputs, weights, gradients"
    assert len(set(map(str, names.values()))) == 18


# -- operations


@pytest.fixture
def custom():
    """Operations of another library."""
    library = torch.library.Library("kinds_of_others", "DEF")
    for schema in ("my_gemm(Tensor x, Tensor w) -> Tensor", "gemmology(Tensor x) -> Tensor", "linear(Tensor x) -> Tensor"):
        library.define(schema)
    yield torch.ops.kinds_of_others
    library._destroy()


SCALED = (torch.ops.lowering.scaled_mm.default, torch.ops.lowering.scaled_grouped_mm.default)
MATMULS = [
    *((getattr(aten, name).default, True) for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "_int_mm")),
    *((getattr(aten, name).default, False) for name in ("mv", "dot", "outer", "convolution", "upsample_linear1d")),
    *((getattr(aten, f"_{name}").default, True) for name in ("scaled_mm", "transformer_encoder_layer_fwd")),
    (aten._native_multi_head_attention.default, True),
    (torch.matmul, False),  # no operation of a traced graph
    *((target, False) for target in (*SCALED, torch.ops.lowering.cast.default, torch.ops.lowering.amaxes.default)),
]


@each(("target", "expected"), MATMULS)
def test_matmuls(target, expected):
    node = fx.Graph().call_function(target, ())
    assert gemms.is_matmul(node) == expected
    assert gemms.is_scaled_gemm(node) == (target in SCALED)


def test_operations_of_others_count_by_whole_words_and_only_calls(custom):
    graph = fx.Graph()
    found = [gemms.is_matmul(graph.call_function(t.default, ())) for t in (custom.my_gemm, custom.gemmology, custom.linear)]
    assert found == [True, False, True]
    assert not gemms.is_matmul(graph.placeholder("mm"))


def test_operands_of_an_operation_of_others(custom):
    def call(*values):
        graph = fx.Graph()
        nodes = [graph.placeholder(f"x{i}") for i in range(len(values))]
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = value
        return graph.call_function(custom.my_gemm.default, tuple(nodes))

    matrix, vector = torch.empty(4, 4, device="meta"), torch.empty(4, device="meta")
    three = call(matrix, matrix, vector)
    assert gemms.operands_of(three) == three.args[:2]
    assert gemms.operands_of(call(3, matrix, matrix))[0].name == "x1", "an int is no operand"
    assert gemms.operands_of(call(matrix)) == gemms.operands_of(call(matrix, vector)) == ()
    assert gemms.addend_of(three) is None


# -- grouped GEMMs

S, E = 24, 3
FORMS = {
    "rows x stack": (((S, 16), (E, 16, 32)), True, "rows", (S, 32, 16), E),
    "rows x rows": (((16, S), (S, 32)), True, "sums", (16, 32, S), E),
    "batched x batched": (((E, 8, 16), (E, 16, 32)), False, "batched", (8, 32, 16), E),
    "stack x rows": (((E, 8, 16), (16, S)), True, None, (8, S, 16), 1),
}


@each("case", FORMS)
def test_forms_of_grouped_gemms(case):
    (a, b), has_offs, form, sizes, groups = FORMS[case]
    graph = fx.Graph()
    x, w, offs = (graph.placeholder(name) for name in ("x", "w", "offs"))
    for placeholder, shape in ((x, a), (w, b), (offs, (E,))):
        placeholder.meta["val"] = torch.empty(shape)
    node = graph.call_function(aten._grouped_mm.default, (x, w, *([offs] if has_offs else [])))
    node.meta["val"] = torch.empty(E, *sizes[:2]) if groups == E and form != "rows" else torch.empty(sizes[:2])
    assert gemms.form_of(node) is form
    assert not gemms.is_of_one_pair(node)
    assert gemms.sizes_of(node) == sizes
    assert gemms.num_groups(node) == groups
    assert (gemms.offs_of(node) is not None) == has_offs
