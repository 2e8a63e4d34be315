"""Decisions that many calls share, such as who computes a GEMM: made once per key, because the host would make them at each."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowering.trials import is_aligned

Made = TypeVar("Made")

#: Of one operation: sizes of inputs may differ at each call.
_MOST = 4096


class Decisions(Generic[Made]):
    """Those of one operation."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Made] = {}
        self.kept: Callable[[Hashable], Made | None] = self._made.get
        """The decision of a key; None where none is kept."""

    def keep(self, key: Hashable, made: Made, x: torch.Tensor) -> None:
        """Keep a decision about x and other tensors. Not while a CUDA graph is captured: no library is tried then, and a later
        decision may differ; nor of tensors in tracing."""
        if isinstance(x, FakeTensor) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if len(self._made) >= _MOST:
            self._made.clear()
        self._made[key] = made

    def clear(self) -> None:
        """Forget all of them."""
        self._made.clear()


def layout_of(x: torch.Tensor) -> tuple[Any, ...]:
    """What decides how a tensor can be read."""
    return x.shape, x.stride(), x.dtype, is_aligned(x)
