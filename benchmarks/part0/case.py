"""What part 0 tries: a name, a function, and what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

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
