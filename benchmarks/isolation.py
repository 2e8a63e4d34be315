"""One failure costs one row: contestants, kernels and choices that are tried, and what became of them.

A CUDA error, such as an illegal access, spoils the process that it happens in: every later call fails, too. `Spoilt` then ends
the process, and `benchmarks.common.main` starts another one, which leaves out what failed and what has its row already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Row = dict[str, Any]


class Spoilt(Exception):
    """A CUDA error that the process does not survive; its row is written."""


def in_words(error: BaseException) -> str:
    """An error's type and the first lines of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:3])[:400]}" if lines else type(error).__name__


def cuda_error() -> str | None:
    """The CUDA error that this process has run into, in words; None while it has none."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as raised:
        return in_words(raised)
    return None


class Attempts:
    """What a benchmark has tried. `rows` are those of a process before this one, which a CUDA error ended."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._known = {row["what"]: row for row in rows}
        self.on_failure: Callable[[Row], None] = lambda row: None
        """Called with the row of a failure at once: what comes after it may not end."""
        self.failed: list[Row] = []

    def resume(self, rows: Iterable[Row]) -> None:
        """Leave out what failed in a process before this one, and what has its row."""
        self._known |= {row["what"]: row for row in rows}

    def has_row(self, what: str) -> bool:
        """Whether a process before this one has measured it."""
        return what in self._known and "failed" not in self._known[what]

    def __call__(self, what: str, function: Callable[[], T]) -> T | None:
        """What the function returns; None where it raises or has failed before, which is a row of its own.

        On a GPU it waits for the device, so that a failure belongs to what caused it.
        """
        if "failed" in self._known.get(what, {}):
            return None
        try:
            found = function()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:
            self.add_failure(what, in_words(error))
            if cuda_error() is not None:
                raise Spoilt(what) from error
            return None
        return found

    def add_failure(self, what: str, text: str) -> None:
        """A row that says what failed and how."""
        row = {"what": what, "failed": text}
        self.failed.append(row)
        self.on_failure(row)
