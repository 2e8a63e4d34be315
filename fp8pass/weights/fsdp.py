"""The Parameters that FSDP gathers, and why no copies of them are cached or gathered in FP8. Reads only."""

from __future__ import annotations

import dataclasses
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8pass.errors import OptionError, Reason, ReasonKind, preview
from fp8pass.graph.gemms import Sharded
from fp8pass.graph.origin import Path, joined
from fp8pass.weights.released import is_withheld


@dataclasses.dataclass(frozen=True, eq=False)
class Managed:
    """A Parameter under `fully_shard`: torch's records of it, an FSDPParam and the FSDPParamGroup that it travels in."""

    parameter: Any
    group: Any

    @property
    def unsharded(self) -> Any:
        """The Parameter that forwards read, the same object in every step; None before the first of them."""
        return getattr(self.parameter, "_unsharded_param", None)

    @property
    def name(self) -> str:
        """Its path in the module that FSDP2 began to gather, which knows it from its first forward on."""
        return str(self.parameter._param_fqn)

    @property
    def ranks(self) -> Any:
        """The process group that it is gathered over."""
        return self.parameter.mesh_info.shard_process_group

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gathered Parameter."""
        found: torch.dtype = self.parameter.param_dtype or self.parameter.orig_dtype
        return found

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part in the master dtype, with the rows of zeros that make all ranks' parts equally large."""
        found: torch.Tensor = self.parameter._sharded_param_data.view(self.parameter.padded_sharded_param_size)
        return found


def managed() -> list[Managed]:
    """All of this process."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    found = []
    for reference in list(_module_state_mapping.values()):
        for group in _groups_of(reference()):
            found += [Managed(p, group) for p in group.fsdp_params]
    return found


def managed_as(parameter: object) -> Managed | None:
    """FSDP2's records of a Parameter that forwards read; None for every other tensor."""
    return next((m for m in managed() if m.unsharded is parameter), None) if isinstance(parameter, nn.Parameter) else None


def of_model(root: nn.Module) -> list[Managed]:
    """The ones whose modules are in a model, in its order."""
    place = {module: i for i, module in enumerate(root.modules())}
    here = [m for m in managed() if m.parameter._module_info.module in place]
    return sorted(here, key=lambda m: place[m.parameter._module_info.module])


def sharded(parameter: object, frame: CodeType | None, owner: Path | None) -> Sharded | None:
    """FSDP2's gather of a Parameter that a forward reads; None for every other tensor. frame, owner: see `eager_readers`."""
    found = managed_as(parameter)
    if found is None or not hasattr(found.parameter.mesh_info, "shard_process_group"):
        return None
    ranks = found.ranks.size()
    size = found.parameter.padded_sharded_param_size
    reason = obstacle(found)
    if reason is None and not is_withheld(found.unsharded):  # of what came in FP8 nothing but copies can be read
        reason = eager_readers(found, frame, owner)
    return Sharded(ranks, size[0] if size else 0, size.numel(), found.ranks, reason)


def obstacle(found: Managed) -> Reason | None:
    """The reason why a Parameter is gathered as it is, whatever reads it; None if there is none."""
    parameter = found.parameter
    local = parameter._sharded_local_tensor
    others = [type(module).__name__ for module in parameter._module_info.shared_modules]
    if not found.group._reshard_after_forward:
        return Reason(
            ReasonKind.READERS,
            "reshard_after_forward=False leaves it gathered after the forward, where other code may read it; so does FSDP2 with"
            " the root's own Parameters",
        )
    if found.ranks.size() == 1:
        return Reason(ReasonKind.BYTES, "FSDP2 shards it over one rank, so nothing is sent")
    if parameter.is_dtensor:
        return Reason(ReasonKind.SHARDED, "tensor parallelism has sharded it before FSDP2")
    if type(local) is not torch.Tensor:
        return Reason(ReasonKind.SHARDED, f"its shard is a {type(local).__name__}, which defines its own gather")
    if others:
        return Reason(ReasonKind.READERS, f"tied: it is a Parameter of another module too, {preview(others)}")
    if len(parameter._orig_size) != 2:
        return Reason(ReasonKind.SHAPE, f"it has {len(parameter._orig_size)} dimensions; FP8 gathers of FSDP2 are for matrices")
    if parameter.fsdp_placement.dim != 0:
        return Reason(ReasonKind.SHAPE, f"it is sharded along dimension {parameter.fsdp_placement.dim}, not along its rows")
    return None


def eager_readers(found: Managed, frame: CodeType | None, owner: Path | None) -> Reason | None:
    """The eager code that may read a Parameter while it is gathered. None runs where a graph is all of the forward of the
    module under `fully_shard`, and nothing else is called before or after that. frame: what Dynamo traced into the graph, None
    where it is not all of it. owner: where the frame finds the module that holds the Parameter."""
    module, name = found.group.modules[0], type(found.group.modules[0]).__name__.removeprefix("FSDP")
    if len(found.group.modules) > 1:
        return Reason(
            ReasonKind.READERS, f"fully_shard gathers it with other modules than {name}, and eager code runs in between"
        )
    if hooks_of(module):
        return Reason(ReasonKind.READERS, f"a hook of {name} runs while it is gathered, and may read it")
    forward = getattr(module.forward, "__func__", module.forward)
    code: Any = getattr(forward, "__code__", None)
    is_own = frame is not None and frame is code and owner is not None and owner.root == code.co_varnames[0]
    holder = _below(module, owner.below) if is_own and owner is not None else None
    if holder is not found.parameter._module_info.module:
        detail = f"a graph is not all of the forward of {name}, and eager code there may read it while it is gathered"
        return Reason(ReasonKind.READERS, detail)
    return None


def hooks_of(module: Any) -> bool:
    """Tell whether a module under `fully_shard` has other hooks than FSDP2's, and ours, which read no values."""
    state = module._get_fsdp_state()
    own = {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}
    held = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    others = [hook for hooks in held for i, hook in hooks.items() if i not in own]
    return _has_any_global_hook() or not all(type(hook).__module__.startswith("fp8pass.") for hook in others)


def _below(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        module = None if module is None else module._modules.get(name)
    return module


def check_model(root: nn.Module) -> None:
    """Raise OptionError if FSDP2 gathers no Parameter of a model, or in a way that FP8 gathers cannot follow."""
    name, found = type(root).__name__, of_model(root)
    inside = {module: path for path, module in root.named_modules()}
    if not found:
        raise OptionError(
            f"fsdp_gather='fp8': no Parameter of {name} is under FSDP2; call fully_shard(model) before its first forward, or"
            f" leave fsdp_gather out"
        )
    for one in found:
        info = one.parameter._module_info
        path = joined(inside[info.module], info.param_name)
        outside = next((type(m).__name__ for m in one.group.modules if m not in inside), None)
        if outside is not None:
            raise OptionError(
                f"fsdp_gather='fp8': fully_shard on {outside} gathers {path} before the forward of the compiled {name}"
                f" begins, when scales are not known yet. Apply fully_shard to {name} itself, before fp8_compile or with"
                f" in_place=True, or compile the whole model"
            )
        if one.parameter.offload_to_cpu:
            raise OptionError(
                f"fsdp_gather='fp8': {path} is under CPUOffloadPolicy, and FSDP2 loses the quantizing extension when"
                f" it copies a shard to the device. Leave out offload_policy, or fsdp_gather"
            )
        if one.group._use_post_forward_mesh:
            ranks = one.group.post_forward_mesh_info.shard_mesh_size
            raise OptionError(
                f"fsdp_gather='fp8': {path} is under fully_shard(reshard_after_forward={ranks}), and FSDP2 gathers no"
                f" quantized shards of fewer ranks than all. Use reshard_after_forward=True or False, or leave fsdp_gather out"
            )


def not_kept(parameter: object) -> Reason | None:
    """The reason why no copies of a Parameter can be cached: its content comes and goes between calls, or its changes leave no
    trace. None if they can."""
    if not isinstance(parameter, torch.Tensor):
        return Reason(ReasonKind.UNTRACKED, "the tensor is not known when the graph is compiled")
    is_wrapper: bool = is_traceable_wrapper_subclass(parameter)
    if is_wrapper:
        return Reason(ReasonKind.SHARDED, f"a {type(parameter).__name__}, computed from other tensors in each call")
    # FSDP1 or FSDP2: the same Parameter with new content and the same version each time.
    is_of_fsdp1 = getattr(parameter, "_fsdp_flattened", False) or type(parameter).__name__ == "FlatParameter"
    if is_of_fsdp1 or managed_as(parameter) is not None:
        return Reason(ReasonKind.SHARDED, "FSDP gathers the Parameter before each use and frees it afterwards")
    if parameter.is_inference():
        return Reason(ReasonKind.UNTRACKED, "made in torch.inference_mode(), so its changes are not counted")
    return None


def _groups_of(state: Any) -> list[Any]:
    """A state has one group, or several since torch 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]
