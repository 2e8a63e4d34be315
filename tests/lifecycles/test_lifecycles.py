"""The standing net: programs as users write them against an independent reference, by turns here, all of them exhaustively.

A case is called program-recipe-option: `pytest tests/lifecycles/test_lifecycles.py -k hooks` runs the programs of hooks.
"""

import pytest

from tests.lifecycles import programs as programs
from tests.lifecycles.harness import OPTIONS, RECIPES, TABLE, check

# Each program under each of its recipes, and with each option that touches it under one of them, by turns.
CASES = {
    entry.name: [
        *((entry, recipe, "") for recipe in entry.recipes),
        *((entry, entry.recipes[(i + j) % len(entry.recipes)], option) for j, option in enumerate(entry.options)),
    ]
    for i, entry in enumerate(TABLE)
}
ALL = [case for own in CASES.values() for case in own]
# One case of each program, another place in its list each time, and one of each option that is not among them.
FAST = [own[i % len(own)] for i, own in enumerate(CASES.values())]
FAST += [next(case for case in ALL if case[2] == option) for option in OPTIONS if option not in {case[2] for case in FAST}]


def left(own):
    """What the exhaustive suite adds for a program: options that the fast one leaves out, and recipes that neither then has."""
    chosen = {recipe for entry, recipe, option in own if option or (entry, recipe, option) in FAST}
    return [case for case in own if case not in FAST and (case[2] or case[1] not in chosen)]


REST = [case for own in CASES.values() for case in left(own)]


def rows(cases, *marks):
    return [pytest.param(*case, id=f"{case[0].name}-{case[1]}-{case[2] or 'defaults'}", marks=marks) for case in cases]


@pytest.mark.parametrize(("entry", "recipe", "option"), [*rows(FAST), *rows(REST, pytest.mark.exhaustive)])
def test_a_program_trains_as_with_fresh_copies_and_scales(entry, recipe, option):
    check(entry, recipe, option)


def test_the_fast_cases_have_every_program_recipe_and_option():
    assert sorted({entry.name for entry, *_ in FAST}) == sorted(entry.name for entry in TABLE), "names are unique"
    assert {recipe for _, recipe, _ in FAST} == set(RECIPES)
    assert {option for *_, option in FAST} == set(OPTIONS)
