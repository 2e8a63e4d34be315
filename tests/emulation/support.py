"""Helpers of the checks."""

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tests.support.fp8 import bits


@contextlib.contextmanager
def emulated_h200(folder: pathlib.Path) -> Iterator[Any]:
    """`tests.support.emulate.emulated_h200`, which only a process with TRITON_INTERPRET=1 can import."""
    from tests.support import emulate

    with emulate.emulated_h200(folder) as emulation:
        yield emulation


def emulated(function: Callable[..., Any], *args: Any, folder: pathlib.Path, dynamic: bool = False) -> tuple[Any, Any]:
    """The results of the code generated for a function, and the emulation."""
    with emulated_h200(folder) as emulation:
        return torch.compile(function, dynamic=dynamic)(*args), emulation


def same_bits(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> int:
    """Raise AssertionError unless results are equal, bit for bit; NaN of any sign is NaN. Returns how many there are."""
    pairs = list(zip(found, wanted, strict=True))
    for i, (ours, theirs) in enumerate(pairs):
        assert (ours.shape, ours.dtype, ours.is_contiguous()) == (theirs.shape, theirs.dtype, True), i
        values = [torch.where(x.float().isnan(), 127, bits(x)) for x in (ours, theirs)]
        differ = int((values[0] != values[1]).sum())
        assert differ == 0, f"{differ} elements of result {i}"
    return len(pairs)
