"""Cases of part 0: a name, a function, and what it found. A group has a process of its own; its cases run in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

Found = dict[str, Any]


class SkipCase(Exception):
    """This machine cannot run a case; the text says what is missing."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that is right or wrong by itself."""

    name: str
    run: Callable[[], Found]
    """Raises where it is wrong; AssertionError for wrong numbers. Returns figures with the unit in the key."""
    operation: str | None = None
    """The registered operation that it calls."""


def within(error: float, bound: float) -> Found:
    """The gate of what need not be equal bit for bit; NaN is not within."""
    if not error <= bound:
        raise AssertionError(f"relative error {error:.2e} > {bound:g}")
    return {"error": error}


def skip_if(reason: str | None) -> None:
    """Leave a case out for a reason, if there is one."""
    if reason is not None:
        raise SkipCase(reason)


#: The group that is timed, so that it runs before the others and alone.
ALONE = "rates"


def groups() -> dict[str, Callable[[torch.device], Iterable[Case]]]:
    """Name -> what makes its cases on a device. Families of operations and names of recipes are looked up, not listed."""
    from benchmarks.part0 import operations, rates, recipes

    found: dict[str, Callable[[torch.device], Iterable[Case]]] = {ALONE: rates.cases}
    for family in operations.families():
        found[family] = lambda on, family=family: operations.cases(family, on)  # type: ignore[misc]
    for recipe in recipes.NAMES:
        found[f"recipe {recipe}"] = lambda on, recipe=recipe: recipes.cases(recipe, on)  # type: ignore[misc]
    return found
