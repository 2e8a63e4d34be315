"""Discovery: which operations multiply matrices and have an FP8 counterpart, whose they are, and what their operands are."""

import torch
from torch import fx, nn

from fp8pass import inspect
from fp8pass.graph import gemms
from tests.support.joint import trace
from tests.support.models import Net
from tests.support.training import fp8

aten = torch.ops.aten


def sites_of(model, *inputs, **options):
    return trace(model, *inputs, recipe="current", **options).run("discover").sites


def rows(sites):
    """(module, role) -> (m, n, k), (kind and orientation of the operands)."""
    return {
        (s.module, s.role): ((s.m, s.n, s.k), *(f"{o.kind}{'.T' if o.transposed else ''}" for o in s.operands)) for s in sites
    }


def test_a_weight_on_the_left():
    left = Net(lambda m, x: m.weight @ x, weight=nn.Parameter(torch.randn(32, 64)))
    assert rows(sites_of(left, torch.randn(64, 16, requires_grad=True))) == {
        ("self", "output"): ((32, 16, 64), "weight", "input"),
        ("self", "grad_input"): ((64, 16, 32), "weight.T", "grad_output"),
        ("self", "grad_weight"): ((32, 64, 16), "grad_output", "input.T"),
    }


def test_modules_of_a_functional_call_have_their_names_in_containers_too():
    """Where it puts plain tensors for Parameters, Dynamo names modules whose names are numbers by calls of `getattr`."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.ReLU(), nn.Linear(48, 32)))
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    rules = {"model.0": None, "model.1.1": "blockwise"}
    compiled = fp8(lambda values, x: torch.func.functional_call(model, values, (x,)), "current", rules=rules)
    compiled(values, torch.randn(16, 32)).sum().backward()
    assert {(g.module, g.recipe) for g in inspect(compiled).gemms} == {("model.0", None), ("model.1.1", "blockwise")}


def test_operations_of_other_libraries_count_by_whole_words_and_their_matrices_are_operands():
    library = torch.library.Library("kinds_of_others", "DEF")
    for schema in ("my_gemm(Tensor x, Tensor w) -> Tensor", "gemmology(Tensor x) -> Tensor"):
        library.define(schema)
    custom, graph = torch.ops.kinds_of_others, fx.Graph()
    for target in (
        aten.addbmm.default,
        aten._int_mm.default,
        aten._transformer_encoder_layer_fwd.default,
        custom.my_gemm.default,
    ):
        assert gemms.is_matmul(graph.call_function(target, ()))
    for target in (
        aten.mv.default,
        aten.upsample_linear1d.default,
        torch.ops.lowering.scaled_mm.default,
        custom.gemmology.default,
    ):
        assert not gemms.is_matmul(graph.call_function(target, ()))
    a, b, vector = (graph.placeholder(name) for name in ("a", "b", "vector"))
    for node, size in ((a, (4, 4)), (b, (4, 4)), (vector, (4,))):
        node.meta["val"] = torch.empty(size, device="meta")
    for args, operands in (((a, b, vector), (a, b)), ((a,), ()), ((a, vector), ())):
        assert gemms.operands_of(graph.call_function(custom.my_gemm.default, args)) == operands
    library._destroy()
