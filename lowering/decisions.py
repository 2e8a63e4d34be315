"""Decisions that many calls share, such as who computes a GEMM: made once per key, because the host would make them at each."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from lowering.trials import ALIGNMENT_BYTES

Made = TypeVar("Made")

#: Of one operation: sizes of inputs may differ at each call.
_MOST = 4096


class Decisions(Generic[Made]):
    """Those of one operation."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Made] = {}

    def get(self, key: Hashable, decide: Callable[[], Made], *, is_cuda: bool) -> Made:
        """The decision of a key. It is not kept while a CUDA graph is being captured: then no library is tried."""
        found = self._made.get(key)
        if found is None:
            found = decide()
            if not (is_cuda and torch.cuda.is_current_stream_capturing()):
                if len(self._made) >= _MOST:
                    self._made.clear()
                self._made[key] = found
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._made.clear()


def layout_of(x: torch.Tensor) -> tuple[Any, ...]:
    """What decides how a tensor can be read."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT_BYTES
