"""The compiled parts of a model: the model itself, or modules of it that were compiled one by one, each with a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fp8pass.runtime.instances import ROOT
from fp8pass.runtime.session import Session


@dataclasses.dataclass(frozen=True)
class Part:
    """A session, and where its model is in a larger one."""

    session: Session
    prefix: str = ""
    """Path of the part, "" for the whole model."""

    def outer(self, module: str) -> str:
        """The path in the whole model of a path in the part."""
        if not self.prefix:
            return module
        return self.prefix if module == ROOT else f"{self.prefix}.{module}"

    def inner(self, module: str) -> str | None:
        """The path in the part of a path in the whole model; None if it is not below the part."""
        if not self.prefix:
            return module
        if module == self.prefix:
            return ROOT
        return module[len(self.prefix) + 1 :] if module.startswith(f"{self.prefix}.") else None


def part_of(parts: Sequence[Part], module: str) -> tuple[Part, str] | None:
    """The part that a path of the whole model belongs to, the innermost one, and the path in it; None if there is none."""
    found = [(part, inner) for part in parts if (inner := part.inner(module)) is not None]
    return max(found, key=lambda pair: len(pair[0].prefix), default=None)
