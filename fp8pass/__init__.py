"""FP8 training for unmodified PyTorch models, as a pass of torch.compile."""

from fp8pass import requests as _requests  # noqa: F401  torch.compiler.load_cache_artifacts has to know its files
from fp8pass.api import (
    diff,
    estimate,
    export_fp8,
    fp8_compile,
    fp8_uncompile,
    inspect,
    monitor,
    rewrite_graph,
    state,
    state_dict_fp8,
    use_rules,
)
from fp8pass.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
)
from fp8pass.tools.suggest import last_blocks, suggest_rules

__version__ = "0.1.0"

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
