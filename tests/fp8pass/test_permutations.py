"""Rows put back after a sort: found only where the index is the inverse of a permutation, and gathered with the same result."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.rewrite.simplify import permuting_scatters
from tests.support.cases import each

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
    "index_add": lambda perm: torch.zeros_like(perm).index_add(0, perm, torch.arange(N)),
}


def put_back(invert):
    return lambda keys, rows: put(rows, invert(keys.sort()[1]))


@each("invert", INVERSES.values())
def test_inverses(invert):
    assert found(put_back(invert)) == 1
    assert found(lambda keys, rows: torch.zeros(N, 3).index_add(0, invert(keys.sort()[1]), rows)) == 1


NO_INVERSES = {
    "a reversed count": lambda perm: torch.zeros_like(perm).scatter(0, perm, torch.arange(N - 1, -1, -1)),
    "a part": lambda perm: torch.zeros(N + 1, dtype=perm.dtype).scatter(0, perm, torch.arange(N))[:N],
    "twice": lambda perm: perm // 2,
    "from the end": lambda perm: torch.full_like(perm, -N).index_add(0, perm, torch.arange(N)),
    "descending": lambda perm: perm.sort(descending=True)[1],
}


def by_sorting(keys):
    return keys.sort()[1].sort()[1]


def test_what_is_no_inverse_no_permutation_or_no_sum_over_zeros():
    assert {case: found(put_back(invert)) for case, invert in NO_INVERSES.items()} == dict.fromkeys(NO_INVERSES, 0)
    rows, indices = torch.randn(N, 3), torch.randint(0, N, (N,))
    assert found(lambda rows, index: put(rows, by_scatter(index)), rows, indices) == 0, "an index that names rows twice"
    assert found(lambda keys, rows: put(rows, by_sorting(keys), torch.ones_like(rows))) == 0
    assert found(lambda keys, rows: put(rows, by_sorting(keys), torch.zeros(N + 1, 3))) == 0, "spare rows"
