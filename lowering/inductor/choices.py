"""How Inductor runs the reductions of blocks of 128: in registers, whichever dimension is contiguous.

By itself it does so up to 64 elements, or where the reduced dimension is contiguous. Here, it takes 32 lines and eight warps.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices

from lowering.formats import BLOCK
from lowering.inductor.buffers import OrderedBuffer


def register() -> None:
    """Decide for kernels with reductions of blocks among Inductor's own choices, process-wide, as lowerings are registered;
    every other kernel is left to them. To be called once."""
    theirs = InductorChoices.should_use_persistent_reduction

    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        return _reduces_blocks(features) or bool(theirs(features, cooperative_reduction))

    InductorChoices.should_use_persistent_reduction = staticmethod(should_use_persistent_reduction)  # type: ignore[method-assign]


def _reduces_blocks(features: Any) -> bool:
    is_ours = any(isinstance(node.node, OrderedBuffer) for node in features.reduction_nodes())
    return is_ours and bool(features.reduction_numel == BLOCK)
