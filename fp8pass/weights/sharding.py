"""Why no copies of a Parameter can be kept: its content comes and goes between calls, or its changes leave no trace."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8pass.reasons import Reason, ReasonKind
from fp8pass.weights.fsdp import managed


def not_kept(parameter: object) -> Reason | None:
    """The reason; None where copies can be kept."""
    if not isinstance(parameter, torch.Tensor):
        return Reason(ReasonKind.UNTRACKED, "the tensor is not known when the graph is compiled")
    is_wrapper: bool = is_traceable_wrapper_subclass(parameter)
    if is_wrapper:
        return Reason(ReasonKind.SHARDED, f"a {type(parameter).__name__}, which is made of other tensors in each call")
    if is_freed_between_uses(parameter):
        return Reason(ReasonKind.SHARDED, "FSDP gathers the Parameter before each use and frees it afterwards")
    if parameter.is_inference():
        return Reason(ReasonKind.UNTRACKED, "made in torch.inference_mode(), so its changes are not counted")
    return None


def is_freed_between_uses(parameter: torch.Tensor) -> bool:
    """Whether FSDP, of either version, gathers it for its uses: it is the same Parameter, with new content and the same version
    each time."""
    if getattr(parameter, "_fsdp_flattened", False):  # FSDP1, use_orig_params=True
        return True
    return type(parameter).__name__ == "FlatParameter" or any(m.unsharded is parameter for m in managed())
