"""Why no copies of a Parameter can be kept: its content comes and goes between calls, or its changes leave no trace."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8pass.reasons import Reason, ReasonKind


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
    if type(parameter).__name__ == "FlatParameter" or "torch.distributed.fsdp" not in sys.modules:
        return type(parameter).__name__ == "FlatParameter"
    return any(parameter is unsharded for unsharded in _unsharded_parameters())


def _unsharded_parameters() -> list[Any]:
    """Those of all modules under `fully_shard`. A Parameter does not tell that it is one."""
    from torch.distributed._composable_state import _module_state_mapping

    found = []
    for reference in list(_module_state_mapping.values()):
        state = reference()
        for group in _groups_of(state):
            found += [getattr(p, "_unsharded_param", None) for p in group.fsdp_params]
    return found


def _groups_of(state: Any) -> list[Any]:
    """A state has one group, or several since torch 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]
