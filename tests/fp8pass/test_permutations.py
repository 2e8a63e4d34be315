"""Rows put back after a sort: found only where the index is the inverse of a permutation, and gathered with the same result."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import fp8_compile, inspect
from fp8pass.rewrite.runner import without
from fp8pass.rewrite.simplify import permuting_scatters
from tests.support.joint import calls, trace
from tests.support.moe import RECIPES, MoE

aten = torch.ops.aten
N = 24


def by_index_put(perm):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return inverse


def by_scatter(perm):
    return torch.zeros_like(perm).scatter(0, perm, torch.arange(0, perm.shape[0]))


def by_sorting(perm):
    return perm.sort()[1]


def by_argsort(perm):
    return torch.argsort(perm, stable=True)


def found(program, *inputs):
    """The number of scatters of a traced program that are permutations; each is checked with numbers."""
    inputs = inputs or (torch.randn(N), torch.randn(N, 3))
    traced = make_fx(torch.func.functionalize(program), tracing_mode="fake")(*inputs)
    scatters = permuting_scatters(traced.graph)
    expected = traced(*inputs)
    for scatter in scatters:
        with traced.graph.inserting_before(scatter.node):
            gathered = traced.graph.call_function(aten.index.Tensor, (scatter.rows, [scatter.index]))
        scatter.node.replace_all_uses_with(gathered)
    traced.recompile()
    assert traced(*inputs).equal(expected)
    return len(scatters)


def put(rows, index, base=None):
    return torch.index_put(torch.zeros_like(rows) if base is None else base, [index], rows, accumulate=True)


def added_to_zeros(perm):
    return torch.zeros_like(perm).index_add(0, perm, torch.arange(N))


def added(perm):
    """Indices that count from the end."""
    return torch.full_like(perm, -N).index_add(0, perm, torch.arange(N))


def accumulated(perm):
    return torch.index_put(torch.full_like(perm, -N), [perm], torch.arange(N), accumulate=True)


def test_counts_that_are_added():
    assert found(lambda keys, rows: put(rows, added_to_zeros(keys.sort()[1]))) == 1
    assert found(lambda keys, rows: put(rows, added(keys.sort()[1]))) == 0
    assert found(lambda keys, rows: put(rows, accumulated(keys.sort()[1]))) == 0


@pytest.mark.parametrize("invert", [by_index_put, by_scatter, by_sorting, by_argsort])
def test_inverses(invert):
    assert found(lambda keys, rows: put(rows, invert(keys.sort()[1]))) == 1
    assert found(lambda keys, rows: put(rows, invert(torch.argsort(keys)))) == 1
    assert found(lambda keys, rows: put(rows, invert(torch.argsort(keys, descending=True)))) == 1
    assert found(lambda keys, rows: torch.zeros(N, 3).index_add(0, invert(keys.sort()[1]), rows)) == 1


def test_the_inverse_of_an_inverse():
    """Rows put where the sort itself says: they are gathered at its inverse, if the graph has it by then."""

    def program(keys, rows):
        perm = keys.sort()[1]
        inverse = by_index_put(perm)
        return put(rows, perm) + inverse[:, None]

    assert found(program) == 1
    assert found(lambda keys, rows: put(rows, keys.sort()[1])) == 0
    assert found(lambda keys, rows: (put(rows, p := keys.sort()[1]), by_index_put(p))[0]) == 0, "computed later"


def reversed_count(perm):
    return torch.zeros_like(perm).scatter(0, perm, torch.arange(perm.shape[0] - 1, -1, -1))


def count_from_one(perm):
    return torch.zeros_like(perm).scatter(0, perm, torch.arange(1, perm.shape[0] + 1)) - 1


def shorter(perm):
    return torch.zeros(N + 1, dtype=perm.dtype).scatter(0, perm, torch.arange(N))[:N]


@pytest.mark.parametrize(
    "invert", [reversed_count, count_from_one, shorter, lambda p: p // 2, lambda p: p.sort(descending=True)[1]]
)
def test_what_is_no_inverse(invert):
    assert found(lambda keys, rows: put(rows, invert(keys.sort()[1]))) == 0


def test_what_is_no_permutation_or_no_sum_over_zeros():
    keys, rows = torch.randn(N), torch.randn(N, 3)
    indices = torch.randint(0, N, (N,))
    assert found(lambda rows, index: put(rows, by_scatter(index)), rows, indices) == 0, "an index that names rows twice"
    assert found(lambda keys, rows: put(rows, by_sorting(keys.sort()[1]), torch.ones_like(rows)), keys, rows) == 0
    assert found(lambda keys, rows: put(rows, by_sorting(keys.sort()[1]), torch.zeros(N + 1, 3)), keys, rows) == 0, "spare rows"
    assert found(lambda keys, rows: put(rows[:1], by_sorting(keys.sort()[1]), torch.zeros_like(rows)), keys, rows) == 0
    matrix = torch.randn(N, N)
    assert found(lambda keys, rows: put(rows, keys.sort(0)[1].sort(0)[1][:, 0]), matrix, rows) == 0, "a column of many sorts"


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_experts_are_the_same_without_the_pass(recipe):
    model = MoE().to(torch.bfloat16)
    x = torch.randn(64, 64, dtype=torch.bfloat16)

    def gradients(*left_out):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        torch._dynamo.reset()
        compiled = fp8_compile(model, recipe, backend="aot_eager")
        with without(*left_out):
            compiled(leaf).square().sum().backward()
        graph = inspect(compiled).graphs[0].after.graph
        return [leaf.grad, *(p.grad for p in model.parameters())], len(calls(graph, aten.index_put.default))

    (ours, gathers), (theirs, scatters) = gradients(), gradients("gather permuted rows")
    assert gathers < scatters
    assert [a.equal(b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)


def test_graphs_without_experts_are_left_alone():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            perm = x[:, 0].sort()[1]
            return self.linear(x[perm])[by_index_put(perm)]

    graph = trace(Sorted(), torch.randn(32, 64)).run().graph
    assert permuting_scatters(graph)
