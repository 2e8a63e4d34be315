"""One weight that FSDP2 gathers in FP8: what its hooks on the local shard do before and after the all-gather.

NOTE [FSDP2's extension points] FSDP2 asks the local shard of a Parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`;
here both are attributes of a plain tensor. The first gives what travels: the FP8 bytes of the shard, by a scale that all ranks
have. What arrives is the rowwise copy of the weight, which graphs take as an input, in memory that FSDP2 frees after a use and
fills again before the next one: a backward that saved the copy finds it filled again. The second lays the copies out. The
Parameter itself gets no values: NOTE [withheld values] in `withheld.py`.

NOTE [which gathers] Only gathers of forwards of the compiled model, and of the backwards of these, are in FP8. A gather for
anybody else, such as `unshard()` or an eager call of the model, brings the Parameter as it is, as does one whose scale is not
known yet; graphs then quantize what was gathered. Ranks must agree on every one: `gathers.py` sees to it.

NOTE [own values] What anybody but a graph reads of a Parameter is its own value. So a Parameter that eager code may read while
it is gathered travels as it is (`fsdp.eager_readers`), and so does one that FSDP2 leaves where it is after the gather, by
`reshard_after_forward=False` or `set_reshard_after_backward(False)`. One that a forward that raised leaves behind is given up,
and one of a backward that raised before the next forward. A graph that reads the Parameter itself, and eager code that runs
beside a graph when FP8 has travelled already, find the dequantized values until ranks agree again; then it travels as it is.

NOTE [two steps] Where a step of delayed scaling ends between a forward and its backward, the copies that the backward saved
keep the scale of their own step. So forwards until then gather the Parameter as it is, and graphs make other copies of it.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from fp8pass.graph.casts import Layout
from fp8pass.recipes.quantization import ScaleFrom
from fp8pass.schemes.eager import CastKind, Made, quantize
from fp8pass.weights.fsdp import Managed
from fp8pass.weights.hollow import CAN_REFUSE
from fp8pass.weights.kept import KeptWeight
from fp8pass.weights.keys import WeightKey
from fp8pass.weights.withheld import give_back, withhold, write
from lowering.formats import Granularity

log = logging.getLogger(__name__)

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class Owner(Protocol):
    """The weights of a compiled model."""

    is_in_forward: Callable[[], bool]
    """Whether this thread is in a forward of it."""
    trains: bool
    """Whether its last outermost forward had gradients."""
    withheld: dict[int, GatheredWeight]
    """The weights whose Parameters have no values, by their identities."""


class Before:
    """What FSDP2 calls for what travels. It belongs to one tensor: a copy or a pickle of it is None."""

    def __init__(self, weight: GatheredWeight):
        self.weight = weight

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Made | None]:
        return self.weight.before()

    def __reduce__(self) -> Any:
        return _nothing, ()


class After:
    """What FSDP2 calls with what arrived."""

    def __init__(self, weight: GatheredWeight):
        self.weight = weight

    def __call__(self, outputs: Any, metadata: Made | None, param_dtype: torch.dtype, *, out: torch.Tensor) -> None:
        self.weight.after(metadata, out)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """What a copied or pickled hook becomes."""


class Batch:
    """The weights of one FSDP group, in its order: their shards are quantized by one launch per kind."""

    def __init__(self) -> None:
        self.weights: list[GatheredWeight] = []
        self._made: dict[GatheredWeight, Made] = {}

    def begin(self, weight: GatheredWeight) -> None:
        """A weight is about to be gathered. A gather that failed may have left something behind."""
        if weight is self.weights[0]:
            self._made = {}

    def take(self, weight: GatheredWeight) -> Made:
        """The quantized shard of a weight."""
        if weight not in self._made:
            kinds: dict[CastKind, list[GatheredWeight]] = {}
            for one in self.weights:
                if one.is_active and one.knows_scale and one.kind.has_state and not one.is_of_another_step:
                    kinds.setdefault(one.kind, []).append(one)
            for kind, same in kinds.items():
                shards = [one.managed.shard.detach().to(one.managed.dtype) for one in same]
                scale = torch.cat([one.scale() for one in same])
                self._made.update(zip(same, quantize(kind, shards, scale), strict=True))
        return self._made.pop(weight)


class GatheredWeight:
    """A weight of one compiled model that may travel in FP8. Holds no strong reference to the Parameter or the model."""

    def __init__(self, managed: Managed, weight: KeptWeight, batch: Batch, owner: Owner):
        """weight: how graphs quantize it."""
        self._parameter, self._group = weakref.ref(managed.parameter), weakref.ref(managed.group)
        self.weight = weight
        self.key: Hashable = (managed.name, repr(weight.quantization), str(managed.dtype))
        """Equal on all ranks."""
        self._batch = batch
        self.owner: Callable[[], Owner | None] = weakref.ref(owner)
        """Of the compiled model; None where that is gone."""
        quantization = weight.quantization
        if quantization.granularity is Granularity.TENSOR_WISE:
            quantization = dataclasses.replace(quantization, scale_from=ScaleFrom.STATE)
        self.kind = CastKind(weight.recipe, quantization, (Layout(False),), managed.dtype, weight.device)
        """Of the cast of a shard, by a scale that is given."""
        self.is_active = False
        """Whether all ranks have agreed to gather it in FP8."""
        self.own_scale: torch.Tensor | None = None
        """Of a weight without state: from the amaxes of all shards, as of this forward."""
        self._plain: list[torch.Tensor] = managed.parameter.all_gather_outputs
        """What FSDP2 gathers into without us: the Parameter's own memory."""
        self._arrived: list[torch.Tensor] = []
        """What FSDP2 gathers into, if FP8 travels: as many bytes as all shards have elements."""
        self._data: torch.Tensor | None = None
        """The rowwise copy: the same memory."""
        self._scale: torch.Tensor | None = None
        self._scale_inv: torch.Tensor | None = None
        self._amax: torch.Tensor | None = None
        """Of this rank's shard: the step boundary makes the largest of all ranks of it."""
        self.was_fp8 = False
        """Whether FP8 travelled to the last forward."""
        self.came_in_fp8 = False
        """Whether FP8 travelled to the last gather: graphs read its copies. Others are for a backward that saved them."""
        self._awaited: int | None = None
        """Step boundaries before the last forward in FP8 with gradients, if its backward is still to come."""
        self.is_read = False
        """Whether something else than its copies was read in a forward that had it gathered in FP8."""
        self.is_read_elsewhere = False
        """Whether a forward that is not ours had it gathered since the last step boundary: a backward may be of both."""

    @property
    def managed(self) -> Managed:
        """torch's records of the Parameter."""
        return Managed(self._parameter(), self._group())

    @property
    def is_alive(self) -> bool:
        """Whether the model is still there."""
        return self._parameter() is not None and self._group() is not None

    @property
    def knows_scale(self) -> bool:
        """Whether there is a scale to quantize by before the gather, the same on all ranks."""
        store, name = self.weight.store, self.weight.name
        if store is None:
            return self.own_scale is not None
        return name in store and not store.needs_first_step([name])

    @property
    def is_for(self) -> str:
        """What it may be gathered in FP8 for; ranks must agree on it. Empty: nothing."""
        return "" if self.is_read else "all"

    def take_part(self) -> None:
        """All ranks have agreed to `is_for`."""

    @property
    def is_of_another_step(self) -> bool:
        """Whether a backward is to come that reads the copies with the scale of a step that has ended: NOTE [two steps]."""
        store = self.weight.store
        return store is not None and self._awaited not in (None, store.version)

    def scale(self) -> torch.Tensor:
        """[1] float32: of the next gather. A backward's is that of the last forward, though a step may have ended meanwhile."""
        if self._scale is not None and in_backward():
            return self._scale
        store = self.weight.store
        # Clones, which stay when the step boundary writes new scales. Indexing by a list would wait for the device.
        own = self.own_scale if store is None else store.scale.narrow(0, store.column(self.weight.name), 1).clone()
        assert own is not None
        self._scale = own.reshape(1)
        return self._scale

    @property
    def is_here(self) -> bool:
        """Whether the copy holds what the Parameter does, as gathered: FSDP2 frees it when it frees the Parameter."""
        return bool(self._arrived) and self._arrived[0].untyped_storage().size() > 0

    def has(self, layouts: Sequence[Layout]) -> bool:
        """Whether there are copies of all these layouts."""
        return self.is_here and self.came_in_fp8

    def part(self, key: WeightKey) -> torch.Tensor:
        """What an input of a graph holds."""
        found = self._amax if key.layout is None else self._data if key.part == "data" else self._scale_inv
        assert found is not None
        return found

    def give_up(self) -> None:
        """A forward or a backward has raised: let FSDP2 gather again what it has left in FP8. See NOTE [own values]."""
        if self.came_in_fp8 and self.is_here:
            self.managed.group.reshard()

    @property
    def is_in_use(self) -> bool:
        """Whether a forward of its group has not ended: of a group of modules perhaps not all have run."""
        return self.managed.group._training_state.name == "FORWARD"

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the compiled model runs."""
        owner = self.owner()
        return owner is not None and owner.is_in_forward()

    # -- the hooks

    def attach(self) -> None:
        """Put the hooks on the local shard: assigning or emptying Parameters makes new ones, without hooks."""
        from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData

        parameter = self.managed.parameter
        local = parameter._sharded_local_tensor
        if getattr(getattr(local, BEFORE, None), "weight", None) is not self:
            setattr(local, BEFORE, Before(self))
            setattr(local, AFTER, After(self))
            parameter._extensions_data = ExtensionsData()

    def before(self) -> tuple[tuple[torch.Tensor, ...], Made | None]:
        """What travels of the shard, and what `after` has to know of it: None where the Parameter travels as it is."""
        managed = self.managed
        parameter = managed.parameter
        self._batch.begin(self)
        if not self.travels_in_fp8():  # what is set here may have to be undone: FSDP2 drops gathers that it made in vain
            # A backward that saved the copy, and that must find the Parameter as it is, gets both, whoever gathers for it.
            is_for_backward = in_backward() or self.is_of_another_step or (self.was_fp8 and not self.is_in_forward)
            parameter.all_gather_outputs = self._plain
            parameter._unsharded_inner_tensors = self.held if is_for_backward else []
            return (managed.shard.detach().to(managed.dtype),), None
        sent, made = self.quantized()
        filled = [] if CAN_REFUSE else self._plain
        parameter.all_gather_outputs, parameter._unsharded_inner_tensors = self._arrived, [*filled, *self.derived]
        return sent, made

    def after(self, made: Made | None, out: torch.Tensor) -> None:
        """Make what graphs read of what arrived; see NOTE [withheld values]."""
        parameter, owner = self.managed.parameter, self.owner()
        self.came_in_fp8 = made is not None
        with torch.inference_mode(False), torch.no_grad():
            give_back(out)
            whole = out.detach()
            if made is None:
                if owner is not None:
                    owner.withheld.pop(id(out), None)
                if parameter._unsharded_inner_tensors:
                    self.fill(whole)
                return
            if not self._arrived:
                self._arrived = parameter.all_gather_outputs
            self.take(made, whole)
            # FSDP2 frees all of them. Until the next gather, the Parameter's own memory is what it gathers into, as without us.
            parameter.all_gather_outputs, parameter._unsharded_inner_tensors = self._plain, self.held
            withhold(out)
            if owner is not None:
                owner.withheld[id(out)] = self

    def show(self) -> None:
        """Let the Parameter have the values that its copies stand for, while it is gathered."""
        self.is_read = True
        whole, (plain,) = self.managed.unsharded, self._plain
        log.warning(
            "fsdp_gather='fp8': %s was gathered in FP8, and something else than its copies is read of it: it gets"
            " dequantized values, until ranks agree to gather it as it is",
            self.managed.name,
        )
        with torch.inference_mode(False), torch.no_grad():
            plain.untyped_storage().resize_(plain.nbytes)  # FSDP2 frees it with what arrived
            give_back(whole)
            write(whole, self.values(whole))

    # -- what depends on the scales

    @property
    def derived(self) -> list[torch.Tensor]:
        """Memory besides what arrives, which FSDP2 frees and allocates with it."""
        return []

    @property
    def held(self) -> list[torch.Tensor]:
        """All memory besides the Parameter's."""
        return [*self._arrived, *self.derived]

    def quantized(self) -> tuple[tuple[torch.Tensor, ...], Made]:
        """What travels, as bytes."""
        made = self._batch.take(self)
        return (made.data[0].view(torch.uint8),), made

    def take(self, made: Made, whole: torch.Tensor) -> None:
        """What graphs read, from what arrived. whole: the Parameter, which has no content yet."""
        if self._data is None:
            width = made.data[0].shape[1]
            self._data = self._arrived[0].view(-1, width)[: whole.shape[0]].view(self.kind.quantization.dtype)
        self._take_scale(made)

    def fill(self, whole: torch.Tensor) -> None:
        """The same from the gathered Parameter, for a backward: by the scale of the last forward in FP8."""
        assert self._data is not None
        (made,) = quantize(self.kind, [whole], self._scale)
        write(self._data, made.data[0])
        self._take_scale(made)

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        """What the Parameter becomes, in float32."""
        assert self._data is not None
        assert self._scale_inv is not None
        return self._data[:, : whole.shape[1]].to(torch.float32).mul_(self._scale_inv)

    def _take_scale(self, made: Made) -> None:
        """The scale and the amax of what has been quantized, which another stream may have made."""
        for tensor in (made.scale_inv[0], made.amax):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if self._scale_inv is None:
            self._scale_inv = made.scale_inv[0].clone()
        write(self._scale_inv, made.scale_inv[0])
        self._amax = made.amax

    def travels_in_fp8(self) -> bool:
        """See NOTE [which gathers] and NOTE [own values]. The same on all ranks."""
        group, store, owner = self.managed.group, self.weight.store, self.owner()
        is_possible = self.is_active and self.knows_scale
        if in_backward():
            self._awaited = None
            return is_possible and self.was_fp8 and not self.is_read_elsewhere and bool(group.reshard_after_backward)
        if not self.is_in_forward:
            self.is_read_elsewhere = True
            return False
        self.was_fp8 = is_possible and bool(group._reshard_after_forward) and not self.is_of_another_step
        if self.was_fp8 and store is not None and owner is not None and owner.trains:
            self._awaited = store.version
        return self.was_fp8


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1
