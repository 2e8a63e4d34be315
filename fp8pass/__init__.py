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
`weights`      FP8 copies of weights that are kept between calls
`rewrite`      the rewrite of one graph
`runtime`      from a model to compiled graphs
`monitoring`   what FP8 does to tensors, in numbers
`session_state.py`  the state of one session
`stateful.py`  the user's view of the state
`inspection`   what was rewritten, what was not and why
`arguments.py` the arguments of `fp8_compile`, checked
`export`       weights in FP8, in formats that inference engines load
`api.py`       the public functions
`search`       which GEMMs FP8 hurts, as rules
`graphs.py`    `rewrite_graph`
`estimation`   expected speed-up and memory of a model that is not run
`estimates.py` `estimate`
`environment.py`  what is installed and what runs here
`__main__.py`  the command line
`integrations` callbacks for training frameworks, none of which is imported here
"""

import sys as _sys
import types as _types

from fp8pass.api import diff, export_fp8, fp8_compile, fp8_uncompile, inspect, monitor, state, state_dict_fp8, use_rules
from fp8pass.estimates import estimate
from fp8pass.graphs import rewrite_graph
from fp8pass.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
)
from fp8pass.search import last_blocks, suggest_rules

__version__ = "0.1.0.dev0"

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "MXFP8BlockScaling",
    "diff",
    "estimate",
    "export_fp8",
    "fp8_compile",
    "fp8_uncompile",
    "inspect",
    "last_blocks",
    "monitor",
    "rewrite_graph",
    "state",
    "state_dict_fp8",
    "suggest_rules",
    "use_rules",
]


class _Package(_types.ModuleType):
    """This package, whose `state` is the function, whenever its subpackage of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "state" or not isinstance(value, _types.ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
