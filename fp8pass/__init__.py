"""FP8 training for unmodified PyTorch models, as a pass of torch.compile.

`errors.py`      every error that a user can meet
`recipes.py`     how tensors are scaled
`rules.py`       which recipe a GEMM follows
`graph`          what can be read off a graph
`state`          the state of delayed scaling
`rewrite`        the rewrite of one graph
`capture`        from a model to compiled graphs
`stateful.py`    the user's view of the state
`inspection.py`  what was rewritten, what was not and why
`api.py`         the public functions
"""

from fp8pass.api import fp8_compile, inspect, state
from fp8pass.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Format

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "fp8_compile",
    "inspect",
    "state",
]
