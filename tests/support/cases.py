"""Cases of a test: all combinations as one, and fewer combinations where each costs seconds.

`each` takes the place of pytest.mark.parametrize where a case takes milliseconds: it runs every one of them and reports all
that fail. `pairwise` picks combinations of arguments in which every two values of different arguments meet. `rest` leaves rows
to the exhaustive suite.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch


def each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each of these arguments, as one case. Random numbers begin anew for each, and Dynamo.

    names, values: as for pytest.mark.parametrize. What failing calls raise, with their arguments, makes an ExceptionGroup.
    """
    words = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [dict(zip(words, [row] if len(words) == 1 else row, strict=True)) for row in values]
    assert rows, f"no values for {names}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            failed: list[Exception] = []
            for row in rows:
                torch._dynamo.reset()  # models of one code share its recompile limit
                torch.manual_seed(0)
                try:
                    test(**given, **row)
                except Exception as error:
                    error.add_note(f"with {row}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(rows)} fail", failed)

        parameters = inspect.signature(test).parameters
        left = [p for name, p in parameters.items() if name not in words]
        run.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]  # what pytest reads: fixtures, other arguments
        return run

    return decorate


def combinations(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Some of the product of `choices`, in which every two values of different choices occur together. Always the same ones."""
    open_pairs = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(choices), 2)
        for a, b in itertools.product(range(len(first)), range(len(second)))
    }
    rows = {row: _pairs(row) for row in itertools.product(*(range(len(choice)) for choice in choices))}
    found = []
    while open_pairs:
        best = max(rows, key=lambda row: len(rows[row] & open_pairs))  # the first of the best
        open_pairs -= rows[best]
        found.append(tuple(choice[k] for choice, k in zip(choices, best, strict=True)))
    return found


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def rest(rows: Iterable[Any]) -> list[Any]:
    """Rows of pytest.mark.parametrize that the exhaustive suite adds to those of the fast one."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.exhaustive) for row in rows]


def pairwise(names: str, *choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with `combinations` of three or more arguments."""
    marks: list[Any] = []
    for row in combinations(*choices):
        given = [value.values[0] if hasattr(value, "marks") else value for value in row]  # of pytest.param
        marks.append(pytest.param(*given, marks=[m for value in row if hasattr(value, "marks") for m in value.marks]))
    return pytest.mark.parametrize(names, marks)
