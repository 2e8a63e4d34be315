"""Rows put back after a sort: found only where the index is the inverse of a permutation, and gathered with the same result."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import inspect
from fp8pass.rewrite.runner import without
from fp8pass.rewrite.simplify import permuting_scatters
from tests.support.cases import each
from tests.support.joint import calls, trace
from tests.support.models import Net
from tests.support.moe import RECIPES, MoE
from tests.support.training import assert_equal, compiled_step

aten = torch.ops.aten
N = 24


def by_index_put(perm):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return inverse


def by_scatter(perm):
    return torch.zeros_like(perm).scatter(0, perm, torch.arange(0, perm.shape[0]))


def found(program, *inputs):
    """The number of scatters of a traced program that are permutations; each is checked with numbers."""
    inputs = inputs or (torch.randn(N), torch.randn(N, 3))
    traced = make_fx(torch.func.functionalize(program), tracing_mode="fake")(*inputs)
    scatters = permuting_scatters(traced.graph)
    expected = traced(*inputs)
    for node, (rows, index) in scatters.items():
        with traced.graph.inserting_before(node):
            gathered = traced.graph.call_function(aten.index.Tensor, (rows, [index]))
        node.replace_all_uses_with(gathered)
    traced.recompile()
    assert traced(*inputs).equal(expected)
    return len(scatters)


def put(rows, index, base=None):
    return torch.index_put(torch.zeros_like(rows) if base is None else base, [index], rows, accumulate=True)


INVERSES = {
    "index_put": by_index_put,
    "scatter": by_scatter,
    "sorting": lambda perm: perm.sort()[1],
    "argsort": lambda perm: torch.argsort(perm, stable=True),
    "index_add": lambda perm: torch.zeros_like(perm).index_add(0, perm, torch.arange(N)),
}


SORTS = (lambda keys: keys.sort()[1], torch.argsort, lambda keys: torch.argsort(keys, descending=True))


def put_back(invert, sort=SORTS[0]):
    return lambda keys, rows: put(rows, invert(sort(keys)))


@each("invert", INVERSES.values())
def test_inverses(invert):
    assert [found(put_back(invert, sort)) for sort in SORTS] == [1] * 3
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


NO_INVERSES = {
    "a reversed count": lambda perm: torch.zeros_like(perm).scatter(0, perm, torch.arange(N - 1, -1, -1)),
    "a count from 1": lambda perm: torch.zeros_like(perm).scatter(0, perm, torch.arange(1, N + 1)) - 1,
    "a part": lambda perm: torch.zeros(N + 1, dtype=perm.dtype).scatter(0, perm, torch.arange(N))[:N],
    "twice": lambda perm: perm // 2,
    "descending": lambda perm: perm.sort(descending=True)[1],
    "from the end": lambda perm: torch.full_like(perm, -N).index_add(0, perm, torch.arange(N)),
    "accumulated": lambda perm: torch.index_put(torch.full_like(perm, -N), [perm], torch.arange(N), accumulate=True),
}


def by_sorting(keys):
    return keys.sort()[1].sort()[1]


def test_what_is_no_inverse_no_permutation_or_no_sum_over_zeros():
    assert {case: found(put_back(invert)) for case, invert in NO_INVERSES.items()} == dict.fromkeys(NO_INVERSES, 0)
    rows, indices = torch.randn(N, 3), torch.randint(0, N, (N,))
    assert found(lambda rows, index: put(rows, by_scatter(index)), rows, indices) == 0, "an index that names rows twice"
    assert found(lambda keys, rows: put(rows, by_sorting(keys), torch.ones_like(rows))) == 0
    assert found(lambda keys, rows: put(rows, by_sorting(keys), torch.zeros(N + 1, 3))) == 0, "spare rows"
    assert found(lambda keys, rows: put(rows[:1], by_sorting(keys), torch.zeros_like(rows))) == 0
    matrix = torch.randn(N, N)
    assert found(lambda keys, rows: put(rows, keys.sort(0)[1].sort(0)[1][:, 0]), matrix, rows) == 0, "a column of many sorts"


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_experts_are_the_same_without_the_pass(recipe):
    model, x = MoE().to(torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)

    def trained(*left_out):
        with without(*left_out):
            compiled, found = compiled_step(model, recipe, x)
        return found, len(calls(inspect(compiled).graphs[0].after.graph, aten.index_put.default))

    (ours, gathers), (theirs, scatters) = trained(), trained("gather permuted rows")
    assert gathers < scatters
    assert_equal(ours, theirs)


def test_graphs_without_experts_are_left_alone():
    def in_order(m, x):
        perm = x[:, 0].sort()[1]
        return m.linear(x[perm])[by_index_put(perm)]

    model = Net(in_order, linear=nn.Linear(64, 64, bias=False))
    graph = trace(model, torch.randn(32, 64)).run().graph
    assert permuting_scatters(graph)
