"""Inputs of measured graphs: a buffer for each module instance, into which forward and backward write statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fp8pass.inputs import BoundInputs, ExtraInput, InputProvider, Needed, Placed, Records, Watched, WatchKey
from lowering.statistics import WIDTH, empty_statistics, merged_statistics

#: Rows of a graph's buffer, unless it needs more: 140 KB.
_ROWS = 1024


class MeasureProvider(InputProvider):
    """Gives measured graphs their buffers, and keeps what they wrote until it is taken."""

    def __init__(self) -> None:
        self._bound: list[BoundBuffer] = []
        self._calls = 0

    def inputs(self, device: torch.device, needed: Needed) -> list[ExtraInput]:
        """The buffer twice: for the forward and for the backward."""
        rows = _ROWS if needed.entries <= _ROWS else 1 << (needed.entries - 1).bit_length()
        shape = (rows, WIDTH)
        return [
            ExtraInput(WatchKey(False), "fp8_statistics", shape, torch.float64),
            ExtraInput(WatchKey(True), "fp8_grad_statistics", shape, torch.float64),
        ]

    def bind(self, placed: Placed) -> BoundBuffer:
        """A buffer for one module instance."""
        bound = BoundBuffer(self, placed)
        self._bound.append(bound)
        return bound

    def next_call(self) -> int:
        """The position of a call among those of the process."""
        self._calls += 1
        return self._calls

    def has_written(self) -> bool:
        """Whether a graph was measured since `take`."""
        return any(bound.call is not None for bound in self._bound)

    def read(self) -> dict[Watched, torch.Tensor]:
        """What was measured since `take`, float64 [WIDTH] on the CPU each, in the order in which it was computed."""
        written = sorted((b for b in self._bound if b.call is not None), key=lambda b: b.call or 0)
        found: dict[Watched, torch.Tensor] = {}
        for is_backward in (False, True):
            for bound in written[::-1] if is_backward else written:
                for watched, vector in bound.rows(is_backward):
                    found[watched] = merged_statistics(found[watched], vector) if watched in found else vector
        return found

    def take(self) -> dict[Watched, torch.Tensor]:
        """`read`, after which nothing is left."""
        found = self.read()
        for bound in self._bound:
            bound.clear()
        return found


class BoundBuffer(BoundInputs):
    """The buffer of one module instance of one graph."""

    def __init__(self, provider: MeasureProvider, placed: Placed):
        self._provider = provider
        self._watched = [dataclasses.replace(w, name=placed.name_tensor(w.name)) for w in placed.watched]
        self.is_read = bool(self._watched)
        rows = placed.inputs[0].shape[0]
        self._empty = empty_statistics(rows, placed.device)
        self._buffer, self._scratch = self._empty.clone(), self._empty.clone()
        self.call: int | None = None
        """Of the last forward since what was written was taken."""

    def tensors(
        self, args: Sequence[Any], records: Records, variants: frozenset[str], remembered: Any
    ) -> Sequence[torch.Tensor]:
        """What does not count goes to a scratch buffer."""
        if records is Records.ALL:
            self.call = self._provider.next_call()
        forward = self._buffer if records is Records.ALL else self._scratch
        backward = self._scratch if records is Records.NOTHING else self._buffer
        return [forward.data, backward.data]

    def rows(self, is_backward: bool) -> list[tuple[Watched, torch.Tensor]]:
        """What one side has measured."""
        values = self._buffer.cpu()
        return [
            (w, values[i].clone()) for i, w in enumerate(self._watched) if w.is_backward == is_backward and values[i, 7] > 0
        ]

    def clear(self) -> None:
        """Nothing was measured."""
        if self.call is not None:
            self._buffer.copy_(self._empty)
            self.call = None
