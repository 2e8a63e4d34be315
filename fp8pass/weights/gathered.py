"""Weights that FSDP2 gathers in FP8: the hooks on their shards, the agreement between ranks, and the scales of a forward.

NOTE [FSDP2's extension points] FSDP2 asks the local shard of a Parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`;
here both are attributes of a plain tensor. The first gives what travels: the FP8 bytes of the shard, by a scale that all ranks
have, or with the scales of its own rows or blocks. What arrives is in memory that FSDP2 frees after a use and fills again
before the next one: a backward that saved a copy finds it filled again. With one scale for the tensor it is the copy that
graphs take as an input; else the second hook lays the copies out, in memory that FSDP2 frees, too. The Parameter itself gets
no values: NOTE [withheld values] in `released.py`.

NOTE [two gathers] Where the copies for forward and backward have different scales, FSDP2 gathers one before each of them: with
`reshard_after_forward=True` it frees a Parameter after the forward and gathers it again. The first gather brings the rowwise
copy, which forward GEMMs read, the second the columnwise one. Graphs have both as inputs: the columnwise copy has no content in
the forward, which only saves views of it. FSDP2 frees it with the Parameter, and the second gather fills it.

NOTE [forward again] A forward that is run again in the backward, by activation checkpointing outside of the compiled graphs,
would need the copy that is not there. It is seen in the first backward, before anything travels in FP8, and such a weight
remains in high precision; a model that begins to do so later is refused.

NOTE [which gathers] Only gathers of forwards of the compiled model, and of the backwards of these, are in FP8. A gather for
anybody else, such as `unshard()` or an eager call of the model, brings the Parameter as it is, as does one whose scale is not
known yet; graphs then quantize what was gathered. Ranks must agree on every one: NOTE [agreement on gathers].

NOTE [own values] What anybody but a graph reads of a Parameter is its own value. So a Parameter that eager code may read while
it is gathered travels as it is (`fsdp.eager_readers`), and so does one that FSDP2 leaves where it is after the gather, by
`reshard_after_forward=False` or `set_reshard_after_backward(False)`. One that a forward that raised leaves behind is given up,
and one of a backward that raised before the next forward. A graph that reads the Parameter itself, and eager code that runs
beside a graph when FP8 has travelled already, find the dequantized values until ranks agree again; then it travels as it is.

NOTE [two steps] Where a step of delayed scaling ends between a forward and its backward, the copies that the backward saved
keep the scale of their own step. So forwards until then gather the Parameter as it is, and graphs make other copies of it.

NOTE [agreement on gathers] A gather is a collective: a rank that sends FP8 while another sends bfloat16 would hang both, or
read one as the other. Which weights graphs take as copies is known on a rank when its graphs have run, and ranks may have run
different ones. So ranks compare what they have before outermost forwards 2, 3, 5, 9, ... of the model, counted since the rules
changed, and gather in FP8 what all of them have. The first forward gathers everything as it is.

NOTE [scales of shards] Delayed scaling knows its scales: the step boundary has made them equal on all ranks. Where a tensor or
a column has a scale of its own, all shards' amaxes are reduced by one all-reduce when an outermost forward begins, whatever has
changed since the last one: writes to Parameters need not leave a trace. Scales of rows and blocks are those of the shards.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8pass.errors import OptionError
from fp8pass.graph.origin import Path
from fp8pass.graph.values import by_key
from fp8pass.inputs import in_backward
from fp8pass.recipes.quantization import ScaleFrom
from fp8pass.rules import Rules
from fp8pass.scales.store import DelayedStore
from fp8pass.schemes import eager, scheme_of
from fp8pass.schemes.copies import Layout
from fp8pass.schemes.eager import CastKind, Made, example, quantize
from fp8pass.weights import fsdp
from fp8pass.weights.cache import CachedWeight, WeightKey, WeightTensor
from fp8pass.weights.fsdp import Managed
from fp8pass.weights.released import CAN_REFUSE, give_back, withhold, write

log = logging.getLogger(__name__)

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class Hook(functools.partial[Any]):
    """A method of a GatheredWeight that FSDP2 calls. It belongs to one tensor: a copy or a pickle of it is None."""

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """A copied or pickled hook. Saved shards name this function by its path, which must not change."""


def _weight_of(local: Any) -> GatheredWeight | None:
    """The weight whose hooks a local shard has."""
    hook = getattr(local, BEFORE, None)
    method: Any = hook.func if isinstance(hook, Hook) else None
    return getattr(method, "__self__", None)


@dataclasses.dataclass(eq=False)
class _Side:
    """The memory of one of a weight's gathers: NOTE [two gathers]. A weight with one gather has one side."""

    arrived: list[torch.Tensor] = dataclasses.field(default_factory=list)  # FSDP2's memory for FP8: the bytes of all shards.
    parts: tuple[torch.Tensor, ...] = ()  # FP8 values [rows, columns] and scales of the whole weight, as they travel.
    copies: dict[Layout, list[torch.Tensor]] = dataclasses.field(default_factory=dict)  # Data and scales of copies for graphs.


class GatheredWeight:
    """A weight of one compiled model that may travel in FP8. Holds no strong reference to the Parameter or the model."""

    def __init__(self, managed: Managed, weight: CachedWeight, batch: list[GatheredWeight], owner: ParameterGathers):
        """weight: how graphs quantize it. batch: the weights of its FSDP group, which are quantized together."""
        self._parameter, self._group = weakref.ref(managed.parameter), weakref.ref(managed.group)
        self.weight = weight
        quantization = weight.quantization
        self.key = (managed.name, repr(quantization), str(managed.dtype))  # Equal on all ranks.
        self._batch = batch
        self.owner: Callable[[], ParameterGathers | None] = weakref.ref(owner)  # The model's weights; None where that is gone.
        scheme = scheme_of(quantization)
        self.has_one_scale = scheme.has_one_scale
        self.has_two_sides = not scheme.has_one_copy(quantization)
        # A column has one scale, though its elements are on all ranks.
        self.needs_column_amaxes = self.has_two_sides and scheme.scales_columns
        known = dataclasses.replace(quantization, scale_from=ScaleFrom.STATE) if self.has_one_scale else quantization
        self._kind = CastKind(weight.recipe, known, (Layout(False),), managed.dtype, weight.device)
        """The cast of a shard by a scale that is given."""
        self._plain: list[torch.Tensor] = managed.parameter.all_gather_outputs  # FSDP2's memory without us: the Parameter's.
        self._sides = {False: _Side(), True: _Side()}
        self._columnwise = False  # The side that the last gather brought, or would have in FP8; with one side, the same.
        self.own_scale: torch.Tensor | None = None  # The scale of a weight without state, of all shards' amaxes, as of now.
        self.column_amaxes: torch.Tensor | None = None
        """[columns] float32, of the whole weight, as of this forward, where scales of columns need them."""
        self._made: Made | None = None  # The quantized shard, which is about to travel.
        self._scale: torch.Tensor | None = None  # [1] float32, the one scale of the last gather in FP8.
        self._amax: torch.Tensor | None = None  # The amax of the own shard: the boundary makes the largest of all of it.
        self.is_active = False  # All ranks have agreed to gather it in FP8.
        self.may_train = not self.has_two_sides
        """Forwards with gradients may gather FP8: with two sides once all ranks have seen a backward."""
        self._was_fp8 = False  # FP8 travelled to the last forward.
        self._came_in_fp8 = False  # FP8 travelled to the last gather: graphs read its copies. Others are for a backward.
        self._awaited: int | None = None  # Step boundaries before the last forward in FP8, if its backward is to come.
        self.is_read = False  # Something else than its copies was read in a forward that had it gathered in FP8.
        self.is_read_elsewhere = False
        """A forward that is not ours had it gathered since the last step boundary: a backward may be of both."""
        self.is_run_again = False  # A forward was run again in a backward: NOTE [forward again].

    @property
    def managed(self) -> Managed:
        """FSDP2's records of the Parameter."""
        return Managed(self._parameter(), self._group())

    @property
    def is_alive(self) -> bool:
        return self._parameter() is not None and self._group() is not None

    @property
    def is_for(self) -> str:
        """The gathers that may be in FP8, on which ranks must agree: "all", "inference", or "" for none."""
        if self.is_read or (self.is_run_again and self.has_two_sides):
            return ""
        return "inference" if self.has_two_sides and not self.weight.trains else "all"

    def activate(self) -> None:
        """Gather in FP8 from now on: all ranks have agreed to `is_for`."""
        self.is_active = True
        self.may_train = self.is_for == "all"

    @property
    def _side(self) -> _Side:
        return self._sides[self._columnwise]

    def _side_of(self, layout: Layout) -> _Side:
        return self._sides[self.has_two_sides and layout.columnwise]

    @property
    def _sends_scales(self) -> bool:
        """True if ranks learn scales from the gather, and do not know them all before."""
        return not self.has_one_scale and not (self.needs_column_amaxes and self._columnwise)

    @property
    def _knows_scale(self) -> bool:
        """True if there is a scale to quantize by before the gather, equal on all ranks."""
        store, name = self.weight.store, self.weight.name
        if not self.has_one_scale:
            return self._sends_scales or self.column_amaxes is not None
        if store is None:
            return self.own_scale is not None
        return name in store and not store.needs_first_step([name])

    @property
    def _is_of_another_step(self) -> bool:
        """True if a backward is to come that reads the copies with the scale of a step that has ended: NOTE [two steps]."""
        store = self.weight.store
        return store is not None and self._awaited not in (None, store.version)

    @property
    def _is_in_forward(self) -> bool:
        owner = self.owner()
        return owner is not None and owner.is_in_forward()

    @property
    def is_here(self) -> bool:
        """True while the Parameter is gathered: FSDP2 frees what arrived when it frees the Parameter."""
        arrived = self._side.arrived
        return bool(arrived) and arrived[0].untyped_storage().size() > 0

    # -- copies

    @property
    def has_copies(self) -> bool:
        """True if graphs can read copies of it, and need not quantize what was gathered."""
        return self.is_here and self._came_in_fp8

    def provide(self, layouts: Sequence[Layout]) -> None:
        """Make the copies that a graph is going to read and that the gather has not brought. Raises OptionError in a forward
        that is run again in the backward."""
        if self._columnwise:
            raise OptionError(
                f"fsdp_gather='fp8': {self.managed.name} is read by a forward that is run again in the backward, which has"
                f" another copy of it: checkpoint activations inside of the compiled module, or leave fsdp_gather out for"
                f" the recipe {self.weight.recipe.name!r}"
            )
        for layout in layouts:
            side = self._side_of(layout)
            if layout in side.copies:
                continue
            if side is self._side:
                with torch.inference_mode(False), torch.no_grad():
                    self._lay_out([layout], *side.parts)
            else:
                side.copies[layout] = self._empty(layout)
            self.managed.parameter._unsharded_inner_tensors += side.copies[layout]

    def part(self, key: WeightKey) -> torch.Tensor:
        """The content of an input of a graph."""
        if key.layout is None:
            assert self._amax is not None
            return self._amax
        return self._side_of(key.layout).copies[key.layout][0 if key.part == "data" else 1]

    def _empty(self, layout: Layout) -> list[torch.Tensor]:
        weight = self.weight
        made = example(CastKind(weight.recipe, weight.quantization, (layout,), weight.dtype, weight.device), weight.shape)
        with torch.inference_mode(False):
            return [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=weight.device)
                for x in (made.data[0], made.scale_inv[0])
            ]

    def _lay_out(self, layouts: Iterable[Layout], data: torch.Tensor, scales: torch.Tensor) -> None:
        """Write copies on this side, from values and scales in the format in which they travel."""
        copies = self._side.copies
        for layout in layouts:
            if self.has_one_scale:  # what travels is the copy
                made: Sequence[torch.Tensor] = (data, scales)
                copies.setdefault(layout, [data, scales])
            else:
                made = eager.ready(data, scales, self.weight.quantization, layout)
                copies.setdefault(layout, [torch.empty_like(x) for x in made])
            for target, values in zip(copies[layout], made, strict=True):
                if target is not values:
                    write(target, values)

    @property
    def _wanted(self) -> list[Layout]:
        return [layout for layout in self.weight.layouts if self._side_of(layout) is self._side]

    @property
    def _derived(self) -> list[torch.Tensor]:
        """Memory besides what arrives, which FSDP2 frees and allocates with it."""
        if self.has_one_scale:
            return []
        owner = self.owner()
        is_saved = self.has_two_sides and not self._columnwise and owner is not None and owner.trains
        sides = [self._side, self._sides[True]] if is_saved else [self._side]
        return [tensor for side in sides for copy in side.copies.values() for tensor in copy]

    # -- the hooks

    def attach(self) -> None:
        """Put the hooks on the local shard: assigning or emptying Parameters makes new ones, without hooks."""
        from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData

        parameter = self.managed.parameter
        local = parameter._sharded_local_tensor
        if _weight_of(local) is not self:
            setattr(local, BEFORE, Hook(self.before))
            setattr(local, AFTER, Hook(self.after))
            parameter._extensions_data = ExtensionsData()

    def before(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Made | None]:
        """The tensors of the shard that travel, and a record for `after`: None where the Parameter travels as it is."""
        managed, parameter = self.managed, self.managed.parameter
        # What others gather between forward and backward is for the backward, too.
        self._columnwise = self.has_two_sides and (in_backward() or not self._is_in_forward)
        if self is self._batch[0]:
            for weight in self._batch:
                weight._made = None  # a gather that failed may have left it behind
        if not self._travels_in_fp8():  # what is set here may have to be undone: FSDP2 drops gathers that it made in vain
            # A backward that saved the copy, and that must find the Parameter as it is, gets both.
            is_for_backward = in_backward() or self._is_of_another_step or (self._was_fp8 and not self._is_in_forward)
            parameter.all_gather_outputs = self._plain
            parameter._unsharded_inner_tensors = [*self._side.arrived, *self._derived] if is_for_backward else []
            return (managed.shard.detach().to(managed.dtype),), None
        made = self._quantized_shard()
        sent = (made.data[0], made.scale_inv[0]) if self._sends_scales else (made.data[0],)
        filled = [] if CAN_REFUSE else self._plain
        parameter.all_gather_outputs = self._side.arrived
        parameter._unsharded_inner_tensors = [*filled, *self._derived]
        return tuple(x.view(torch.uint8) for x in sent), made

    def after(self, outputs: Any, made: Made | None, param_dtype: torch.dtype, *, out: torch.Tensor) -> None:
        """Make the copies that graphs read of what arrived; see NOTE [withheld values]."""
        parameter, owner, side = self.managed.parameter, self.owner(), self._side
        self._came_in_fp8 = made is not None
        with torch.inference_mode(False), torch.no_grad():
            give_back(out)
            whole = out.detach()
            if made is None:
                if owner is not None:
                    owner.withheld.pop(id(out), None)
                if parameter._unsharded_inner_tensors:  # for a backward: by the scale of the last forward in FP8
                    self._lay_out(self._wanted, *self._encoded(whole))
                return
            if not side.arrived:
                side.arrived = parameter.all_gather_outputs
            self._take(made, whole.shape[0])
            # FSDP2 frees all of them. Until the next gather, the Parameter's own memory is what it gathers into, as without us.
            parameter.all_gather_outputs = self._plain
            parameter._unsharded_inner_tensors = [*side.arrived, *self._derived]
            withhold(out)
            if owner is not None:
                owner.withheld[id(out)] = self

    def _take(self, made: Made, rows: int) -> None:
        side, sent, scales = self._side, made.data[0], made.scale_inv[0]
        self._record(made)
        if not side.parts:
            data = side.arrived[0].view(-1, sent.shape[1])[:rows].view(sent.dtype)
            if self._sends_scales:
                width = scales.shape[1] * scales.element_size()
                scales = side.arrived[1].view(-1, width).view(scales.dtype)
            else:
                scales = scales.clone()
            side.parts = (data, scales)
        elif not self._sends_scales:
            write(side.parts[1], scales)
        self._lay_out(self._wanted, *side.parts)

    def show(self) -> None:
        """Let the Parameter have the values that its copies stand for, while it is gathered."""
        self.is_read = True
        whole, (plain,) = self.managed.unsharded, self._plain
        log.warning(
            "fsdp_gather='fp8': %s was gathered in FP8, and it is also used in high precision: it gets dequantized"
            " values, until ranks agree to gather it in high precision",
            self.managed.name,
        )
        with torch.inference_mode(False), torch.no_grad():
            plain.untyped_storage().resize_(plain.nbytes)  # FSDP2 frees it with what arrived
            give_back(whole)
            data, scales = self._side.parts
            if self.has_one_scale:
                values = data[:, : whole.shape[1]].to(torch.float32).mul_(scales)
            else:
                values = eager.compact_values(data, scales, self.weight.quantization)
            write(whole, values)

    def give_up(self) -> None:
        """Let FSDP2 gather again what a forward or a backward that raised has left in FP8: NOTE [own values]."""
        if self.has_copies:
            self.managed.group.reshard()

    # -- scales

    def _quantized_shard(self) -> Made:
        """The shard as it travels. Those of a group that have one scale each are quantized by one launch per kind."""
        if not self.has_one_scale:
            amaxes = self.column_amaxes if self.needs_column_amaxes and self._columnwise else None
            shard = self.managed.shard.detach().to(self.managed.dtype)
            data, scales = eager.compact(shard, self.weight.quantization, columnwise=self._columnwise, amaxes=amaxes)
            return Made((data,), (scales,))
        if self._made is None:
            active = (one for one in self._batch if one.is_active and one.has_one_scale)
            sent = [one for one in active if one._knows_scale and not one._is_of_another_step]
            for kind, same in by_key(sent, lambda one: one._kind).items():
                shards = [one.managed.shard.detach().to(one.managed.dtype) for one in same]
                scale = torch.cat([one._next_scale() for one in same])
                for one, made in zip(same, quantize(kind, shards, scale), strict=True):
                    one._made = made
        found, self._made = self._made, None
        assert found is not None
        return found

    def _encoded(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of the gathered Parameter, in the format in which they would have travelled."""
        if not self.has_one_scale:
            return eager.compact(whole, self.weight.quantization, columnwise=self._columnwise, amaxes=None)
        (made,) = quantize(self._kind, [whole], self._scale)
        self._record(made)
        return made.data[0], made.scale_inv[0]

    def _record(self, made: Made) -> None:
        """Take the amax, and keep the memory of what another stream may have made."""
        for tensor in (made.scale_inv[0], made.amax):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._amax = made.amax

    def _next_scale(self) -> torch.Tensor:
        """[1] float32. A backward's is that of the last forward, though a step may have ended meanwhile."""
        if self._scale is not None and in_backward():
            return self._scale
        store = self.weight.store
        # Clones, which remain when the step boundary writes new scales. Indexing by a list would wait for the device.
        own = self.own_scale if store is None else store.scale.narrow(0, store.column(self.weight.name), 1).clone()
        assert own is not None
        self._scale = own.reshape(1)
        return self._scale

    def _travels_in_fp8(self) -> bool:
        """True if this gather is in FP8, on all ranks alike: NOTE [which gathers], NOTE [own values]."""
        group, store, owner = self.managed.group, self.weight.store, self.owner()
        is_possible = self.is_active and self._knows_scale
        if in_backward():
            self._awaited = None
            return is_possible and self._was_fp8 and not self.is_read_elsewhere and bool(group.reshard_after_backward)
        if owner is None or not self._is_in_forward:
            self.is_read_elsewhere = True
            return False
        is_possible = is_possible and (self.may_train or not owner.trains)
        self._was_fp8 = is_possible and bool(group._reshard_after_forward) and not self._is_of_another_step
        if self._was_fp8 and store is not None and owner.trains:
            self._awaited = store.version
        return self._was_fp8


class ParameterGathers:
    """The weights of one compiled model that may be gathered in FP8."""

    def __init__(self, root: Callable[[], nn.Module | None], rules: Rules, is_in_forward: Callable[[], bool]):
        """rules: those in force. is_in_forward: whether this thread is in a forward of the model."""
        self._root, self._rules, self.is_in_forward = root, rules, is_in_forward
        self._weights: dict[tuple[int, Any], GatheredWeight] = {}  # By FSDP2's record of the Parameter and how it is cast.
        self._claimed: dict[Rules, dict[GatheredWeight, None]] = {}  # The weights that graphs take as copies under these rules.
        self._batches: dict[int, list[GatheredWeight]] = {}  # The active weights of each FSDP group, in its order.
        self._is_checked = False  # FSDP2 gathers the model as it can in FP8.
        self._num_forwards = 0  # Outermost ones, since the rules changed.
        self.trains = False  # The last of them had gradients.
        self.withheld: dict[int, GatheredWeight] = {}  # Weights of Parameters without values, by id: NOTE [withheld values].

    def claim(
        self,
        parameter: torch.Tensor,
        tensor: WeightTensor,
        store: DelayedStore | None,
        name: str,
        frame: CodeType | None,
        owner: Path | None,
    ) -> GatheredWeight | None:
        """A weight that a graph is going to take as a copy; None if it cannot be gathered in FP8. frame, owner: of the graph,
        see `fsdp.eager_readers`."""
        found = fsdp.managed_as(parameter)
        if found is None or fsdp.obstacle(found) is not None:
            return None
        is_read = fsdp.eager_readers(found, frame, owner) is not None
        key = (id(found.parameter), (tensor.recipe, tensor.quantization, name))
        weight = self._weights.get(key)
        if weight is None or not weight.is_alive:
            if is_read:
                return None
            batch = self._batches.setdefault(id(found.group), [])
            weight = GatheredWeight(found, CachedWeight((parameter,), tensor, store, name), batch, self)
            self._weights[key] = weight
        weight.is_read |= is_read
        self._claimed.setdefault(self._rules, {})[weight] = None
        return weight

    def use_rules(self, rules: Rules) -> None:
        """Gather weights as they are, until ranks have agreed under these rules."""
        self._rules, self._num_forwards = rules, 0
        for weight in self._weights.values():
            weight.is_active = False

    def begin_forward(self, trains: bool) -> None:
        """Prepare an outermost forward of the model, with or without gradients, on all ranks. Raises OptionError where FSDP2
        cannot gather in FP8, and torch.distributed's errors."""
        root = self._root()
        if root is None:
            return
        if not self._is_checked:
            fsdp.check_model(root)
            self._is_checked = True
        before, self.trains = self._num_forwards, trains
        self._num_forwards += 1
        if before and before & (before - 1) == 0:
            self._agree(root)
        active = self._active
        for weight in active:
            weight.attach()
            weight.is_read |= fsdp.hooks_of(weight.managed.group.modules[0])
            if weight.managed.group._training_state.name != "FORWARD":  # of a group of modules perhaps not all have run
                weight.give_up()
        self.give_back()
        self._find_scales([w for w in active if w.has_one_scale and w.weight.store is None])
        if trains:
            columns = [w for w in active if w.needs_column_amaxes and w.may_train]
            for weight, amaxes in _largest_amaxes(columns, _column_amaxes).items():
                weight.column_amaxes = amaxes

    @property
    def _active(self) -> list[GatheredWeight]:
        return [w for w in self._weights.values() if w.is_active and w.is_alive]

    def after_error(self) -> None:
        """Clean up after an outermost forward that raised."""
        for weight in self._active:
            weight.give_up()

    def after_step(self) -> None:
        """Take note of a step boundary: no backward of the step before is to come."""
        for weight in self._weights.values():
            weight.is_read_elsewhere = False
        self.give_back()

    def show(self, parameters: Iterable[object]) -> None:
        """Let Parameters have values that a graph is about to read itself."""
        for parameter in parameters if self.withheld else ():
            if id(parameter) in self.withheld and self.withheld[id(parameter)].is_here:
                self.withheld.pop(id(parameter)).show()

    def show_all(self) -> None:
        """Let all Parameters have values: eager code is about to run beside a graph."""
        self.show([weight.managed.unsharded for weight in self.withheld.values() if weight.is_alive])

    def give_back(self) -> None:
        """Let Parameters that are gathered no more have their memory: the next gather may come without our hooks."""
        for i, weight in list(self.withheld.items()):
            if not (weight.is_alive and weight.is_here):
                del self.withheld[i]
                if weight.is_alive:
                    give_back(weight.managed.unsharded)

    def _agree(self, root: nn.Module) -> None:
        """Gather in FP8 what all ranks have; see NOTE [agreement on gathers]."""
        claimed = [w for w in self._claimed.get(self._rules, {}) if w.is_alive]
        for ranks in dict.fromkeys(m.ranks for m in fsdp.of_model(root)):
            here = {(w.key, w.is_for): w for w in claimed if w.managed.ranks is ranks}
            every: list[Any] = [None] * ranks.size()
            dist.all_gather_object(every, sorted(here), group=ranks)
            agreed = set.intersection(*map(set, every))
            for key, weight in here.items():
                if key not in agreed or not weight.is_for:
                    weight.is_active = False
                    continue
                if not weight.is_active:
                    self._join(weight)
                weight.activate()

    def _join(self, weight: GatheredWeight) -> None:
        """Add a weight to the batch of its group."""
        managed = weight.managed
        if self._other_owner(managed):
            gc.collect()  # a model that was given up may be part of a cycle
            if self._other_owner(managed):
                raise OptionError(
                    f"fsdp_gather='fp8': {managed.name} is gathered in FP8 for another compiled model; give fsdp_gather to only"
                    f" one of them"
                )
        batch = self._batches[id(managed.group)]
        members = {*(w for w in batch if w.is_alive), weight}
        order = {id(p): i for i, p in enumerate(managed.group.fsdp_params)}
        batch[:] = sorted(members, key=lambda w: order[id(w.managed.parameter)])

    def _other_owner(self, managed: Managed) -> bool:
        other = _weight_of(managed.parameter._sharded_local_tensor)
        return other is not None and other.owner() not in (None, self)

    def _find_scales(self, weights: list[GatheredWeight]) -> None:
        """Scale weights that have no state; see NOTE [scales of shards]."""
        amaxes = _largest_amaxes(weights, lambda shards: torch.ops.lowering.amaxes(shards).reshape(-1))
        for q in dict.fromkeys(w.weight.quantization for w in amaxes):  # as graphs compute it
            same = [w for w in amaxes if w.weight.quantization == q]
            with torch.no_grad():
                amax = torch.cat([amaxes[w] for w in same])
                scale, _ = torch.ops.lowering.scales_from_amax(amax, q.dtype, epsilon=q.epsilon, power_of_2=q.power_of_2)
            for weight, one in zip(same, scale.split(1), strict=True):
                weight.own_scale = one


def _column_amaxes(shards: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ops.lowering.amax_rowwise([shard], rowwise=False, columnwise=True) for shard in shards]


def _largest_amaxes(
    weights: list[GatheredWeight], amaxes_of: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]
) -> dict[GatheredWeight, torch.Tensor]:
    """The amaxes of whole weights, float32: of their shards, reduced by one all-reduce per group of ranks."""
    in_order = sorted(weights, key=lambda w: str(w.key))  # which is the same on all ranks
    found: dict[GatheredWeight, torch.Tensor] = {}
    for ranks, same in by_key(in_order, lambda w: w.managed.ranks).items():
        with torch.no_grad():
            own = amaxes_of([w.managed.shard.detach() for w in same])
            # The gathered Parameter may be rounded. Rounding keeps the order of magnitudes, so that of the largest is the
            # largest.
            each = [x.to(w.managed.dtype).reshape(-1).to(torch.float32) for x, w in zip(own, same, strict=True)]
            # As int32 the bit patterns are ordered, NaN above inf: MAX loses neither.
            bits = torch.cat(each).view(torch.int32) & 0x7FFFFFFF
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=ranks)
            found.update(zip(same, bits.view(torch.float32).split([x.numel() for x in each]), strict=True))
    return found
