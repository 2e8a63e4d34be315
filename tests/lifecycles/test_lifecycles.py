"""The standing net: programs as users write them against an independent reference, by turns here, all of them exhaustively."""

from __future__ import annotations

import pytest

from tests.lifecycles import flow, growth, memory, optimizers, teachers
from tests.lifecycles.harness import OPTIONS, RECIPES, TABLE, Entry, check

FILES = (teachers, memory, optimizers, growth, flow)


def cases() -> list[tuple[Entry, str, str]]:
    """Each program under each of its recipes, and with each option that touches it under one of them, by turns."""
    found = []
    for i, entry in enumerate(TABLE):
        found += [(entry, recipe, "") for recipe in entry.recipes]
        for j, option in enumerate(option for option in entry.options if option):
            found.append((entry, entry.recipes[(i + j) % len(entry.recipes)], option))
    return found


def turns() -> list[tuple[Entry, str, str]]:
    """One case of each program, the next recipe and the next option at each, so that all of them occur."""
    found = []
    for i, entry in enumerate(TABLE):
        own = [case for case in cases() if case[0] is entry]
        found.append(own[i % len(own)])
    missing = {*OPTIONS} - {option for *_, option in found}
    first = {option: case for case in reversed(cases()) for option in [case[2]]}
    return found + [first[option] for option in OPTIONS if option in missing]


def params(chosen, *marks):
    return [pytest.param(*case, id="-".join((case[0].name, case[1], case[2] or "defaults")), marks=marks) for case in chosen]


FAST = turns()
REST = [case for case in cases() if case not in FAST]


@pytest.mark.parametrize(
    ("entry", "recipe", "option"), [*params(FAST), *params(REST, pytest.mark.exhaustive)]
)
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
