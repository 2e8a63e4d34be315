"""How users are told that something does not run as they asked for: a warning, or with `strict=True` an error."""

from __future__ import annotations

import os
import sys
import types
import warnings

import torch

from fp8pass.errors import Fp8Warning, StrictError


def tell(text: str, category: type[Fp8Warning], *, strict: bool) -> None:
    """Warn at the line of the user's code that is running, or raise StrictError."""
    if strict:
        raise StrictError(f"{text} (strict=True makes an error of it)")
    warnings.warn(text, category, stacklevel=_stacklevel_of_caller())


def _stacklevel_of_caller() -> int:
    """What makes a warning of the calling function point at the first frame that is neither torch's nor ours."""
    own = tuple(f"{os.path.dirname(str(package))}{os.sep}" for package in (torch.__file__, __file__))
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
        level += 1
    return level
