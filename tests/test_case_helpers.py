"""tests.support.cases: every case runs, all failures are reported, every pair occurs."""

import itertools

import pytest
import torch

from tests.support import suites
from tests.support.cases import combinations, each, rest


def test_each_runs_all_and_reports_all_that_fail():
    seen = []

    @each("x", [1, 2, 3])
    @each(("a", "b"), [(10, 20), (30, 40)])
    def test(x, a, b, fixture):
        seen.append((x, a, b, fixture, torch.rand(()).item()))
        assert x != 2
        assert b < 40 or x != 3

    with pytest.raises(ExceptionGroup, match="2 of 3 fail") as raised:
        test(fixture="f")
    assert [row[:4] for row in seen] == [(x, a, b, "f") for x in (1, 2, 3) for a, b in ((10, 20), (30, 40))]
    assert len({row[4] for row in seen}) == 1, "seeded anew"
    both, one = raised.value.exceptions
    assert [len(both.exceptions), len(one.exceptions)] == [2, 1]
    assert one.__notes__ == ["with {'x': 3}"]
    assert one.exceptions[0].__notes__ == ["with {'a': 30, 'b': 40}"]


def test_each_refuses_to_run_nothing():
    with pytest.raises(AssertionError, match="no values for x"):
        each("x", [])


@each("sizes", [(2, 3), (2, 3, 4), (7, 3, 4, 2, 2), (5, 5, 5), (1, 4, 1)])
def test_every_pair_occurs(sizes):
    choices = [[f"{i}{k}" for k in range(size)] for i, size in enumerate(sizes)]
    found = combinations(*choices)
    assert found == combinations(*choices)
    for (i, first), (j, second) in itertools.combinations(enumerate(choices), 2):
        assert {(row[i], row[j]) for row in found} == set(itertools.product(first, second))
    largest = sorted(sizes)[-2:]
    assert len(found) <= 1.5 * largest[0] * largest[1]


def test_the_rest_is_exhaustive():
    one, pair = rest(["a", ("b", 2)])
    assert (one.values, pair.values) == (("a",), ("b", 2))
    assert all([mark.name for mark in row.marks] == ["exhaustive"] for row in (one, pair))


def test_the_list_of_the_exhaustive_suite_names_cases_that_exist():
    """By file and function: a case that is renamed would join the fast suite."""
    root = suites.LIST.parents[1]
    texts = {name.partition("::")[0]: (root / name.partition("::")[0]).read_text() for name in suites.listed()}
    functions = {name: name.partition("[")[0].rpartition("::")[2] for name in suites.listed() if "::" in name}
    assert [name for name, function in functions.items() if f"def {function}(" not in texts[name.partition("::")[0]]] == []
