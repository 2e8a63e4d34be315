"""FP8 training for unmodified PyTorch models, as a pass of torch.compile."""

from fp8pass.api import fp8_compile, inspect, state
from fp8pass.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "fp8_compile",
    "inspect",
    "state",
]
