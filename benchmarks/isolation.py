"""One failure costs one row: a run of a benchmark, which tries contestants and kernels.

A CUDA error, such as an illegal access, spoils its process: every later call fails, too. It ends the run, whose rows are
written by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Row = dict[str, Any]


def in_words(error: BaseException) -> str:
    """An error's type and the first lines of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:3])[:400]}"


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
    """A run of a benchmark: what it tries, and what its record says besides the rows. baseline: the contestant that ratios
    compare with, measured in the same run. checks: everything that was verified before anything was timed. on_failure: called
    with the row of a failure at once, for what comes after it may not end."""

    def __init__(self, quick: bool = False, on_failure: Callable[[Row], None] = lambda row: None) -> None:
        self.quick, self.on_failure = quick, on_failure
        self.baseline = ""
        self.checks: list[str] = []
        self.notes: list[str] = []
        self.failed: list[Row] = []

    def require(self, condition: bool, text: str) -> bool:
        """The correctness gate: no figure without it. Raises, or returns True."""
        if not condition:
            raise AssertionError(f"not correct, so not timed: {text}")
        self.checks.append(text)
        return True

    def __call__(self, what: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call the function and return its result; None where it raises, which is a row of its own. On a GPU it waits for the
        device, so that a failure belongs to what caused it."""
        try:
            found = function(*arguments)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:
            self.failed.append({"what": what, "failed": in_words(error)})
            self.on_failure(self.failed[-1])
            if cuda_error() is not None:
                raise
            return None
        return found

    def row(self, what: str, function: Callable[..., Row], *arguments: Any) -> Iterator[Row]:
        """The row that the function returns; none where it fails."""
        found = self(what, function, *arguments)
        if found is not None:
            yield found
