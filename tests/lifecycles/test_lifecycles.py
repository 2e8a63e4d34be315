"""The standing net: programs as users write them against an independent reference, by turns here, all of them exhaustively."""

import pytest

from tests.lifecycles.harness import OPTIONS, RECIPES, TABLE, check
from tests.lifecycles.table import FILES, cases, name, turns

FAST = turns()
REST = [case for case in cases() if case not in FAST]


def params(chosen, *marks):
    return [pytest.param(*case, id=name(case), marks=(*marks, *known(case[0]))) for case in chosen]


def known(entry):
    return [pytest.mark.xfail(reason=entry.fault, strict=True)] if entry.fault else []


@pytest.mark.parametrize(("entry", "recipe", "option"), [*params(FAST), *params(REST, pytest.mark.exhaustive)])
def test_a_program_trains_as_with_fresh_copies_and_scales(entry, recipe, option):
    check(entry, recipe, option)


def test_the_fast_cases_have_every_program_recipe_and_option():
    assert {entry.name for entry, *_ in FAST} == {entry.name for entry in TABLE}
    assert {recipe for _, recipe, _ in FAST} == set(RECIPES)
    assert {option for *_, option in FAST} == set(OPTIONS)


def test_every_file_of_programs_is_in_the_table():
    assert {entry.program.__module__ for entry in TABLE} == {module.__name__ for module in FILES}
    names = [entry.name for entry in TABLE]
    assert sorted(names) == sorted(set(names))
    assert all(set(entry.recipes) <= set(RECIPES) and set(entry.options) <= set(OPTIONS) for entry in TABLE)
