"""The cases of part 0 by group. A group has a process of its own; its cases run in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from benchmarks.part0 import operations, rates, recipes
from benchmarks.part0.case import Case
from lowering.operation import NAMESPACE

#: The group that is timed, so that it runs before the others and alone.
ALONE = "rates"


def groups() -> dict[str, Callable[[torch.device], Iterable[Case]]]:
    """Name -> what makes its cases on a device. Rooms of operations and names of recipes are looked up, not listed."""
    found: dict[str, Callable[[torch.device], Iterable[Case]]] = {ALONE: rates.cases}
    for room in dict.fromkeys(operations.room_of(name) for name in NAMESPACE.operations):
        found[room] = lambda on, room=room: operations.cases(room, on)  # type: ignore[misc]
    for recipe in recipes.NAMES:
        found[f"recipe {recipe}"] = lambda on, recipe=recipe: recipes.cases(recipe, on)  # type: ignore[misc]
    return found
