"""Typed reasons: why a GEMM or an all-gather stays in high precision, or a weight is cast at each call."""

from __future__ import annotations

import dataclasses
import enum


class ReasonKind(enum.Enum):
    """What kind of obstacle it is: the first word of the reason's text."""

    RULE = "rule"
    RECIPE = "recipe"
    """An option of the recipe."""
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    HARDWARE = "hardware"
    """The device has no GEMM of this kind."""
    OPERAND_FORMATS = "operand formats"
    UNSUPPORTED_OP = "unsupported op"
    ROUTING = "routing"
    """The GEMM's result selects rows."""
    HEAD = "head"
    """The output embedding."""
    THIN = "thin"
    """Too few columns, or too short a K."""
    EAGER = "ran eagerly"
    """torch.compile left its module out of the compiled graphs."""
    SLOW = "slow"
    """Expected to be slower in FP8."""
    READERS = "readers"
    """Something else reads a gathered tensor in high precision."""
    SCALES = "scales"
    """The ranks of a gather do not have equal scales."""
    BYTES = "bytes"
    """FP8 would not make the message smaller."""
    DERIVED = "derived"
    """A weight that is computed in each call."""
    SHARDED = "sharded"
    """A weight whose content is spread over ranks, and goes away between calls."""
    UNTRACKED = "untracked"
    """A weight that does not count its changes."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """A typed reason with its particulars."""

    kind: ReasonKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}"
