"""The table of the net: which program runs under which recipe and option. `turns` are those of the fast suite."""

from tests.lifecycles import flow, growth, memory, optimizers, teachers
from tests.lifecycles.harness import OPTIONS, TABLE, Entry

Case = tuple[Entry, str, str]
FILES = (teachers, memory, optimizers, growth, flow)


def cases() -> list[Case]:
    """Each program under each of its recipes, and with each option that touches it under one of them, by turns."""
    found = []
    for i, entry in enumerate(TABLE):
        found += [(entry, recipe, "") for recipe in entry.recipes]
        for j, option in enumerate(option for option in entry.options if option):
            found.append((entry, entry.recipes[(i + j) % len(entry.recipes)], option))
    return found


def turns() -> list[Case]:
    """One case of each program, another place in its list each time, and one of each option that is not among them."""
    found = []
    for i, entry in enumerate(TABLE):
        own = [case for case in cases() if case[0] is entry]
        found.append(own[i % len(own)])
    missing = {*OPTIONS} - {option for *_, option in found}
    first = {case[2]: case for case in reversed(cases())}
    return found + [first[option] for option in OPTIONS if option in missing]


def name(case: Case) -> str:
    """program-recipe-option."""
    entry, recipe, option = case
    return "-".join((entry.name, recipe, option or "defaults"))
