"""What the scripts share that compare lowerings with the reference."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def bits(x: torch.Tensor) -> torch.Tensor:
    """Its bytes, with one bit pattern for NaN: the sign of a NaN is nobody's concern."""
    nan = x.isnan() if x.dtype == torch.float32 else x.to(torch.float32).isnan()
    whole = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.uint8)
    return torch.where(nan, 127, whole)


def same_bits(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> int:
    """Raise AssertionError unless results are equal, bit for bit. Returns how many there are."""
    pairs = list(zip(found, wanted, strict=True))
    for i, (ours, theirs) in enumerate(pairs):
        assert (ours.shape, ours.dtype, ours.is_contiguous()) == (theirs.shape, theirs.dtype, True), i
        differ = int((bits(ours) != bits(theirs)).sum())
        assert differ == 0, f"{differ} elements of result {i}"
    return len(pairs)


def print_results(checks: Mapping[str, Callable[[pathlib.Path], Any]]) -> None:
    """Run each check with an empty folder, and print as JSON what it returned, or the traceback of what it raised."""
    results: dict[str, Any] = {}
    for name, check in checks.items():
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                results[name] = check(pathlib.Path(folder))
            except Exception:
                results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)
