"""Inductor lowerings of the operations. The backend calls `register_lowerings`; importing `lowering` does not.

registry      registration, room by room
tensorwise    the room of one scale per tensor: operation -> lowering
casts         cast, amax, multi_amax
scales        scale_from_amax, scales_from_amax
gemm          scaled_mm
rowwise       the room of one scale per row: casts, scaled_mm_rowwise
blockwise     the room of one scale per block: casts
statistics    quantization_statistics, which join casts
state         the room of the state: load_scales, take, record_amax
elementwise   arithmetic of one element, in Inductor's virtualized ops
choices       how Inductor runs the reductions of blocks
ahead         kernels of operations that run as they are, compiled meanwhile
buffers       Inductor IR: where values come from, buffers with a fixed loop order
"""

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
    """What there is to do about a graph before Inductor compiles it; changes it in place."""
    from lowering.inductor import registry

    registry.prepare(graph)
