"""Casts as tests ask for them and look for them: of one matrix or of several, to one copy or to both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from fp8pass.graph.casts import CastNode
from fp8pass.graph.kinds import is_scaled_gemm


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


def casts_by(target: Any, nodes: Iterable[fx.Node], many: bool | None = None, both: bool | None = None) -> list[fx.Node]:
    """The nodes that call a cast: of several matrices, of one, or either (None); to both copies, to one, or either."""
    found = [node for node in nodes if node.target is target]
    return [
        node
        for node in found
        if many in (None, len(node.args[0]) > 1)  # type: ignore[arg-type]
        and both in (None, node.kwargs["rowwise"] and node.kwargs["columnwise"])
    ]
