"""Names of quantized tensors: data with one text form, which `str` writes and `TensorName.parse` reads."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args

from fp8pass.graph.origin import Path

Kind = Literal["input", "weight", "grad_output"]
"""What an operand is to its GEMM."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_LABEL = re.compile(rf"(?P<kind>{'|'.join(KINDS)})(?:#(?P<index>\d+))?(?:@(?P<format>float8_\w+))?(?:@recipe(?P<recipe>\d+))?")


#: A number in a path: that of a layer, or of an instance of a function's variable (`layer#1`).
NUMBER = re.compile(r"(?<![^.#])\d+(?![^.])")


def family(module: str) -> str:
    """A module's path with numbers as `*`: the same for equal layers, and a pattern that matches them all."""
    return NUMBER.sub("*", module)


@dataclasses.dataclass(frozen=True)
class TensorName:
    """A quantized tensor: the module and the kind of the GEMM operand that it is named after."""

    module: str
    """Path of the module in the user's model."""
    kind: Kind
    index: int = 1
    """Counts the different tensors of one module and kind, from 1: a module that is called twice has two."""
    format: str | None = None
    """The FP8 dtype, such as "float8_e5m2", where the same tensor is also quantized to another one."""
    recipe: int | None = None
    """Position of the tensor's recipe among those that keep state, where it is not the one that the rules give to the GEMM that
    the tensor is named after."""
    path: Path | None = dataclasses.field(default=None, compare=False, repr=False)
    """The module as the compiled frame names it; None where the text was parsed, and outside of any module."""

    def __str__(self) -> str:
        index = f"#{self.index}" if self.index > 1 else ""
        format_ = f"@{self.format}" if self.format else ""
        recipe = "" if self.recipe is None else f"@recipe{self.recipe}"
        return f"{self.module}:{self.kind}{index}{format_}{recipe}"

    @classmethod
    def parse(cls, text: str) -> TensorName:
        """The name that `str` wrote; raises ValueError for any other text."""
        module, colon, label = text.rpartition(":")
        match = _LABEL.fullmatch(label)
        if not colon or not module or match is None:
            raise ValueError(f"{text!r} is not the name of a quantized tensor; one looks like 'layers.0.attn.wq:input'")
        kind = next(k for k in KINDS if k == match["kind"])
        recipe = None if match["recipe"] is None else int(match["recipe"])
        return cls(module, kind, int(match["index"] or 1), match["format"], recipe)

    def placed(self, module: str) -> TensorName:
        """The same tensor of another instance of the module."""
        return dataclasses.replace(self, module=module)
