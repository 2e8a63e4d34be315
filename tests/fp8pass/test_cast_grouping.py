"""Grouping: fires where casts stand ready together, nowhere else, and changes no number."""

import copy

import pytest
import torch
from torch import fx, nn

from fp8pass import inspect
from fp8pass.rewrite import runner
from tests.support.cases import rest
from tests.support.copies import BOTH, CastNode, casts_by
from tests.support.joint import trace
from tests.support.models import LlamaBlock, ResidualMlp
from tests.support.training import assert_equal, compiled_step


def shared(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if (cast := CastNode.read(n)) is not None and len(cast.matrices) > 1]


def graph_of(compiled) -> fx.Graph:
    return inspect(compiled).graphs[0].after.graph


def step(model: nn.Module, recipe: str, x: torch.Tensor, **options):
    return compiled_step(copy.deepcopy(model), recipe, x, count=2, **options)


CASES = [(LlamaBlock(64, 128, 2), recipe, {}, 2) for recipe in ("delayed", "current")]
COPIES = {"delayed": 4, "current": 4, "blockwise": 4, "rowwise": 2}  # rowwise: only its columnwise copies, which are backward's
CASES += [
    (nn.Sequential(ResidualMlp(), ResidualMlp()), recipe, {"weight_copies": "recompute"}, n) for recipe, n in COPIES.items()
]


@pytest.mark.parametrize(("model", "recipe", "options", "expected"), CASES)
def test_casts_are_grouped_without_a_change_of_numbers(model, recipe, options, expected):
    """Of weights and the gradients of attention; of the single copies of both layers, where backward makes them again."""
    x = torch.randn(2, 16, 64)
    compiled, grouped = step(model, recipe, x, **options)
    launches = shared(graph_of(compiled))
    assert len([n for n in launches if not options or CastNode.read(n).orientations != BOTH]) == expected
    amaxes = graph_of(compiled).find_nodes(op="call_function", target=torch.ops.lowering.amaxes.default)
    assert options or sum(len(n.args[0]) > 1 for n in amaxes) == (2 if recipe == "current" else 0)
    with runner.without("plan launches"):
        compiled, alone = step(model, recipe, x, **options)
    assert shared(graph_of(compiled)) == []
    assert_equal(grouped, alone)


def test_different_paddings_are_different_groups():
    """Weights [20, 32] are the b of GEMMs with N = 20 in forward, those of [32, 20] in backward."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 20), nn.GELU(), nn.Linear(20, 32), nn.GELU()) for _ in range(2)))
    work = trace(model, torch.randn(16, 32, requires_grad=True)).run()
    launches = {
        tuple(tuple(m.meta["val"].shape) for m in n.args[0]): (n.kwargs["pad_rows"], n.kwargs["pad_cols"])
        for n in casts_by(torch.ops.lowering.cast.default, work.graph.nodes, many=True)
    }
    assert launches == {((20, 32), (20, 32)): (True, False), ((32, 20), (32, 20)): (False, True)}


@pytest.mark.parametrize("recipe", ["current", "rowwise", *rest(["delayed", "blockwise"])])
def test_a_launch_has_so_many_matrices_at_most(recipe, monkeypatch):
    """Weights of later layers are cast in front of their own first GEMM. No number changes. Five weights; the input stands
    ready as they do, where it is scaled as they are."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(5))), torch.randn(16, 32)
    results = []
    for most, sizes in ((2, [2, 2]), (16, [5])) if recipe == "blockwise" else ((2, [2, 2, 2]), (16, [6])):
        monkeypatch.setattr("fp8pass.rewrite.launches.MOST_CASTS", most)
        compiled, numbers = step(model, recipe, x)
        graph = graph_of(compiled)
        launches = [n for n in shared(graph) if CastNode.read(n).orientations == BOTH]
        assert [len(n.args[0]) for n in launches] == sizes
        order = {n: i for i, n in enumerate(graph.nodes)}
        first_gemm = next(i for n, i in order.items() if "scaled_mm" in str(n.target))
        assert [order[n] > first_gemm for n in launches] == [False, *[True] * (len(sizes) - 1)]
        results.append(numbers)
    assert_equal(*results)


def planned(model, *inputs, **options):
    """The names of the tensors of each launch of more than one cast."""
    plan = trace(model, *inputs, **options).run("plan launches").plan
    return [[str(c.tensor.name) for c in launch] for launch in plan.launches if len(launch) > 1]


def test_launches_of_a_plan():
    block, x = LlamaBlock(64, 128, 2), torch.randn(2, 16, 64)
    weights = [f"{name}:weight" for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")]
    gradients = [f"{name}:grad_output" for name in ("wv", "wk", "wq")]
    for recipe in ("delayed", "current", "blockwise", "rowwise"):
        found = planned(block, x, recipe=recipe)
        assert [found[0], sorted(found[1])] == [weights, sorted(gradients)]
        alone = [] if recipe == "rowwise" else [weights]  # rowwise copies without others: see its `launch_key`
        assert planned(block, x, recipe=recipe, trains=False) == alone
    assert planned(block, x, recipe="mxfp8") == [], "its casts have no launch for several tensors"


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", *rest(["current", "rowwise"])])
def test_copies_that_backward_makes_again_are_grouped_by_layer(recipe):
    """So that those of one layer exist at a time: made before the first GEMM of a layer, on either side of the partition."""
    model = nn.Sequential(*(LlamaBlock(64, 128, 2) for _ in range(3)))
    work = trace(model, torch.randn(2, 16, 64, requires_grad=True), recipe=recipe, weight_copies="recompute")
    plan = work.run("plan launches").plan
    weights = [launch for launch in plan.launches if launch[0].tensor.name.kind == "weight"]
    names = ("wq", "wk", "wv", "wo", "gate", "up", "down")
    expected = [{f"{layer}.{name}" for name in names} for layer in range(3)]
    sides = {False: expected, True: expected[::-1]}
    if recipe == "rowwise":  # its rowwise copies are kernels of their own
        assert sum(not launch[0].at.is_backward for launch in weights) == sum(map(len, sides.pop(False)))
    for is_backward, order in sides.items():
        side = [launch for launch in weights if launch[0].at.is_backward == is_backward]
        assert [{c.tensor.name.module for c in launch} for launch in side] == order
        assert all(c.is_pinned == is_backward and len(c.copies) == 1 for launch in side for c in launch)
