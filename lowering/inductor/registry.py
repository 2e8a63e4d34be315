"""Registration with Inductor: the lowerings of each room, once. Operations without one run as they are."""

from __future__ import annotations

import functools


@functools.cache
def register_all() -> None:
    """Register every lowering once."""
    from torch._inductor.lowering import register_lowering

    from lowering.inductor import blockwise, choices, rowwise, state, tensorwise

    for room in (tensorwise, rowwise, blockwise, state):
        for operation, function in room.LOWERINGS.items():
            register_lowering(operation, type_promotion_kind=None)(function)
    choices.register()
