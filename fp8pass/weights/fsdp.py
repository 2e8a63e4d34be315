"""What FSDP2 (`fully_shard`) does with the Parameters of a model, and what stands against gathering them in FP8. Reads only."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import nn

from fp8pass.errors import OptionError, preview
from fp8pass.graph.sites import Sharded
from fp8pass.reasons import Reason, ReasonKind


@dataclasses.dataclass(frozen=True, eq=False)
class Managed:
    """A Parameter that FSDP2 gathers: torch's own records of it, an FSDPParam and the FSDPParamGroup that it travels in."""

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
        """Of the gathered Parameter."""
        found: torch.dtype = self.parameter.param_dtype or self.parameter.orig_dtype
        return found

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part in the master dtype, with the rows of zeros that make all ranks' parts equally large."""
        found: torch.Tensor = self.parameter._sharded_param_data.view(self.parameter.padded_sharded_param_size)
        return found


def managed() -> list[Managed]:
    """Those of all modules under `fully_shard` in this process."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    found = []
    for reference in list(_module_state_mapping.values()):
        for group in _groups_of(reference()):
            found += [Managed(p, group) for p in group.fsdp_params]
    return found


def of_model(root: nn.Module) -> list[Managed]:
    """Those whose modules are in a model, in its order."""
    place = {module: i for i, module in enumerate(root.modules())}
    here = [m for m in managed() if m.parameter._module_info.module in place]
    return sorted(here, key=lambda m: place[m.parameter._module_info.module])


def sharded(parameter: object) -> Sharded | None:
    """How FSDP2 gathers a Parameter that a forward reads; None for every other tensor."""
    found = next((m for m in managed() if m.unsharded is parameter), None) if isinstance(parameter, nn.Parameter) else None
    if found is None or not hasattr(found.parameter.mesh_info, "shard_process_group"):
        return None
    ranks = found.ranks.size()
    size = found.parameter.padded_sharded_param_size
    return Sharded(ranks, size[0] if size else 0, size.numel(), found.ranks, obstacle(found))


def obstacle(found: Managed) -> Reason | None:
    """Why a Parameter is gathered as it is, whatever the graphs do with it."""
    parameter = found.parameter
    local = parameter._sharded_local_tensor
    others = [type(module).__name__ for module in parameter._module_info.shared_modules]
    if not found.group._reshard_after_forward:
        return Reason(
            ReasonKind.READERS,
            "reshard_after_forward=False leaves it gathered after the forward, where others read it; FSDP2 has that for the"
            " root's own Parameters, too",
        )
    if found.ranks.size() == 1:
        return Reason(ReasonKind.BYTES, "FSDP2 shards it over one rank, so nothing travels")
    if parameter.is_dtensor:
        return Reason(ReasonKind.SHARDED, "FSDP2 shards what tensor parallelism has sharded before")
    if type(local) is not torch.Tensor:
        return Reason(ReasonKind.SHARDED, f"its shard is a {type(local).__name__}, which says itself how it is gathered")
    if others:
        return Reason(ReasonKind.READERS, f"tied: it is a Parameter of another module too, {preview(others)}")
    if len(parameter._orig_size) != 2:
        return Reason(ReasonKind.SHAPE, f"it has {len(parameter._orig_size)} dimensions; FP8 gathers of FSDP2 are for matrices")
    if parameter.fsdp_placement.dim != 0:
        return Reason(ReasonKind.SHAPE, f"it is sharded along dimension {parameter.fsdp_placement.dim}, not along its rows")
    return None


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
        path = ".".join(filter(None, (inside[info.module], info.param_name)))
        outside = next((type(m).__name__ for m in one.group.modules if m not in inside), None)
        if outside is not None:
            raise OptionError(
                f"fsdp_gather='fp8': fully_shard on {outside} gathers {path} before the forward of the compiled {name}"
                f" begins, when scales are not known yet. Apply fully_shard to {name} itself, before fp8_compile or with"
                f" in_place=True, or compile the whole model"
            )
        if one.parameter.offload_to_cpu:
            raise OptionError(
                f"fsdp_gather='fp8': {path} is under CPUOffloadPolicy, and FSDP2 loses what quantizes a shard when it"
                f" copies it to the device. Leave out offload_policy, or fsdp_gather"
            )
        if one.group._use_post_forward_mesh:
            ranks = one.group.post_forward_mesh_info.shard_mesh_size
            raise OptionError(
                f"fsdp_gather='fp8': {path} is under fully_shard(reshard_after_forward={ranks}), and FSDP2 gathers no"
                f" quantized shards of fewer ranks than all. Use reshard_after_forward=True or False, or leave fsdp_gather out"
            )


def _groups_of(state: Any) -> list[Any]:
    """A state has one group, or several since torch 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]
