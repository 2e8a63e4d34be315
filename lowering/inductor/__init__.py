"""Inductor lowerings of the operations. The backend calls `register_lowerings`; importing `lowering` does not."""

from __future__ import annotations

import torch
from torch import fx

#: Casts, whose first results are copies of their matrices, one of each.
CASTS = (torch.ops.lowering.cast.default, torch.ops.lowering.cast_rowwise.default, torch.ops.lowering.cast_blockwise.default)


def register_lowerings() -> None:
    """Tell Inductor how to generate code for the operations; safe to call again."""
    from lowering.inductor import registry

    registry.register_all()


def prepare(graph: fx.Graph) -> None:
    """Prepare a graph for Inductor, in place."""
    from lowering.inductor import registry

    registry.prepare(graph)
