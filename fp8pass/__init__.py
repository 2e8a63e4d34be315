"""FP8 training for unmodified PyTorch models, as a pass of torch.compile.

`errors.py`    every error that a user can encounter
`notices.py`   how users are warned
`reasons.py`   why a GEMM or an all-gather stays in high precision
`cost`         the speed-up of a GEMM that is expected on a device
`graph`        what can be read off a graph, and how nodes are made
`recipes`      how tensors are scaled
`rules.py`     which recipe a GEMM follows
`schemes`      how each kind of scales is computed, applied and sent
`inputs.py`    inputs that the pass adds to graphs, and what provides them
`state`        the state of delayed scaling
`rewrite`      the rewrite of one graph
`capture`      from a model to compiled graphs
`session_state.py`  the state of one session
`stateful.py`  the user's view of the state
`inspection`   what was rewritten, what was not and why
`arguments.py` the arguments of `fp8_compile`, checked
`attach.py`    how a compiled model carries its session
`by_name.py`   the backend by its name, "fp8pass"
`api.py`       the public functions
`integrations` callbacks for training frameworks, none of which is imported here
"""

import sys as _sys
import types as _types

from fp8pass.api import fp8_compile, fp8_uncompile, inspect, state
from fp8pass.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "MXFP8BlockScaling",
    "fp8_compile",
    "fp8_uncompile",
    "inspect",
    "state",
]


class _Package(_types.ModuleType):
    """This package, whose `state` is the function, whenever its subpackage of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "state" or not isinstance(value, _types.ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
