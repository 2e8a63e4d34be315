"""One failure costs one row: a run of a benchmark, which tries contestants, kernels and choices.

A CUDA error, such as an illegal access, spoils its process: every later call fails, too. `Spoilt` then ends the process, and
`benchmarks.common.main` starts another one, which leaves out what failed and what has its row already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


class Bench:
    """A run of a benchmark: what it tries, and what its record says besides the rows."""

    def __init__(self, quick: bool = False, command: str = "") -> None:
        self.quick = quick
        """True for a smoke run."""
        self.command = command
        self.baseline = ""
        """The contestant that ratios compare with, measured in the same run."""
        self.checks: list[str] = []
        """Everything that was verified before anything was timed."""
        self.notes: list[str] = []
        self.where = "gpu" if torch.cuda.is_available() else "cpu"
        """The machine or compiler of the figures, in the file's name."""
        self.keeps_rows = False
        """True if rows of earlier runs that this one does not make again stay in the file."""
        self.failed: list[Row] = []
        self.on_failure: Callable[[Row], None] = lambda row: None
        """Called with the row of a failure at once: what comes after it may not end."""
        self._known: dict[str, Row] = {}

    def require(self, condition: bool, text: str) -> bool:
        """The correctness gate: no figure without it. Raises, or returns True."""
        if not condition:
            raise AssertionError(f"not correct, so not timed: {text}")
        self.checks.append(text)
        return True

    def resume(self, rows: Iterable[Row]) -> None:
        """Leave out what failed in a process before this one, and what has its row."""
        self._known |= {row["what"]: row for row in rows}

    def has_row(self, what: str) -> bool:
        """True if a process before this one has measured it."""
        return what in self._known and "failed" not in self._known[what]

    def __call__(self, what: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call the function and return its result; None where it raises or has failed before, which is a row of its own.

        On a GPU it waits for the device, so that a failure belongs to what caused it.
        """
        if "failed" in self._known.get(what, {}):
            return None
        try:
            found = function(*arguments)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:
            row = {"what": what, "failed": in_words(error)}
            self.failed.append(row)
            self.on_failure(row)
            if cuda_error() is not None:
                raise Spoilt(what) from error
            return None
        return found

    def row(self, what: str, function: Callable[..., Row], *arguments: Any) -> Iterator[Row]:
        """The row that the function returns; none where it fails."""
        found = self(what, function, *arguments)
        if found is not None:
            yield found
