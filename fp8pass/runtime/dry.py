"""Dry passes: forwards and backwards by which torch finds out shapes, on tensors without content. They are no training.

NOTE [dry passes] Unless it is told them, torch's `PipelineStage` finds out the shapes of what stages send each other: it runs
the stage on memory without content and, in torch 2.13, differentiates it, at the first step of a schedule and whenever the
schedule turns from training to evaluation or back. Nothing of such a pass is recorded, measured or counted as a step. A forward
of it is recognized by the methods on the stack that called it; its backward writes where the forward was told to.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_STAGE = "torch.distributed.pipelining.stage"
#: Methods of `PipelineStage` that run the stage on tensors without content: in torch 2.13, and before.
_DRY = frozenset(("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference"))


def is_dry() -> bool:
    """Whether what is called now is part of a dry pass. Costs nothing in a program without pipelines."""
    return _stage_that_runs(_DRY) is not None


def stage_on_stack() -> Any:
    """The stage of a pipeline that is running, whatever for; None where none is."""
    return _stage_that_runs(_DRY | {"forward_one_chunk"})


def _stage_that_runs(methods: frozenset[str]) -> Any:
    pipelines = sys.modules.get(_STAGE)
    frame: FrameType | None = None if pipelines is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in methods:
            found = frame.f_locals.get("self")
            if isinstance(found, pipelines._PipelineStageBase):  # type: ignore[union-attr]
                return found
        frame = frame.f_back
    return None
