"""Casts as tests ask for them and look for them: of one matrix or of several, to one copy or to both."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import arguments_of
from fp8pass.graph.gemms import is_scaled_gemm
from fp8pass.rewrite.meaning import CASTS

ops = torch.ops.lowering
_WITHOUT_PADDING = {ops.quantize.default, ops.cast_lines_rowwise.default}

BOTH = (False, True)
"""Orientations of the copies of a cast that makes two, in the order of its outputs."""


@dataclasses.dataclass(frozen=True)
class CastNode:
    """A cast in a graph, by the names of its arguments."""

    node: fx.Node

    @classmethod
    def read(cls, node: fx.Node) -> CastNode | None:
        """The view of a node; None if it is not a cast that GEMMs read: copies that travel are made ready for them later."""
        is_cast = node.target in CASTS - _WITHOUT_PADDING and not node.kwargs.get("compact")
        return cls(node) if is_cast else None

    @property
    def matrices(self) -> tuple[fx.Node, ...]:
        """The values that are quantized."""
        given = arguments_of(self.node)
        return tuple(given["xs"]) if "xs" in given else (given["x"],)

    @property
    def scale(self) -> tuple[fx.Node, ...] | None:
        """The scale of each matrix, or the vector of a batch's; None where the operation computes them."""
        given = arguments_of(self.node)
        return tuple(given["scales"]) if "scales" in given else None

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        dtype: torch.dtype = arguments_of(self.node)["dtype"]
        return dtype

    @property
    def orientations(self) -> tuple[bool, ...]:
        """For each copy of a matrix: it is columnwise."""
        given = arguments_of(self.node)
        return tuple(side for side, name in zip(BOTH, ("rowwise", "columnwise"), strict=True) if given.get(name, side))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that say how scales are made."""
        layout = {"rowwise", "columnwise", "pad_outer", "pad_rows", "pad_cols", "with_amax"}
        return {k: v for k, v in self.node.kwargs.items() if k not in layout and not k.endswith("_index")}


def both(granularity: str) -> dict[str, str]:
    """The options of a GEMM whose operands have scales alike."""
    return {"granularity_a": granularity, "granularity_b": granularity}


def one_copy(*, columnwise: bool = False, pad_outer: bool = False, **others: Any) -> dict[str, Any]:
    """The arguments of a cast that makes the rowwise or the columnwise copy alone, its outer dimension padded or not; `others`
    as they are."""
    pads = {"pad_rows": pad_outer and not columnwise, "pad_cols": pad_outer and columnwise}
    return {"rowwise": not columnwise, "columnwise": columnwise, **pads, **others}


def scaled_gemms(graph: fx.Graph) -> list[fx.Node]:
    """The FP8 GEMMs of a graph."""
    return [n for n in graph.nodes if is_scaled_gemm(n)]


def casts(graph: fx.Graph) -> list[CastNode]:
    """The casts of a graph."""
    return [cast for n in graph.nodes if (cast := CastNode.read(n)) is not None]
