"""All weights of a compiled model that FSDP2 gathers in FP8: agreement between ranks, and the scales of a forward.

NOTE [agreement on gathers] A gather is a collective: a rank that sends FP8 while another sends bfloat16 would hang both, or
read one as the other. Which weights graphs take as copies is known on a rank when its graphs have run, and ranks may have run
different ones. So ranks compare what they have before outermost forwards 2, 3, 5, 9, ... of the model, counted since the rules
changed, and gather in FP8 what all of them have. The first forward gathers everything as it is.

NOTE [scales of shards] Delayed scaling knows its scales: the step boundary has made them equal on all ranks. Where a tensor's
scale is its own, all shards' amaxes are reduced by one all-reduce when an outermost forward begins, whatever has changed since
the last one: writes to Parameters need not leave a trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fp8pass.errors import OptionError
from fp8pass.graph.origin import Path
from fp8pass.rules import Rules
from fp8pass.scales.store import DelayedStore
from fp8pass.schemes import scheme_of
from fp8pass.weights import fsdp
from fp8pass.weights.blocks import GatheredBlocks
from fp8pass.weights.gathered import BEFORE, Batch, GatheredWeight
from fp8pass.weights.halves import GatheredHalves
from fp8pass.weights.kept import KeptWeight
from fp8pass.weights.keys import WeightTensor
from fp8pass.weights.withheld import give_back

Gathering = TypeVar("Gathering", bound=GatheredWeight)


class ParameterGathers:
    """The weights of one compiled model that may be gathered in FP8."""

    def __init__(self, root: Callable[[], nn.Module | None], rules: Rules, is_in_forward: Callable[[], bool]):
        """rules: those in force. is_in_forward: whether this thread is in a forward of the model."""
        self._root, self._rules, self.is_in_forward = root, rules, is_in_forward
        self._weights: dict[tuple[int, Any], GatheredWeight] = {}
        """By FSDP2's record of the Parameter and how it is quantized."""
        self._claimed: dict[Rules, dict[GatheredWeight, None]] = {}
        """Those that graphs take as copies under these rules."""
        self._batches: dict[int, Batch] = {}
        self._is_checked = False
        """Whether FSDP2 gathers the model as it can in FP8."""
        self._num_forwards = 0
        """Outermost ones, since the rules changed."""
        self.trains = False
        """Whether the last of them had gradients."""
        self.withheld: dict[int, GatheredWeight] = {}
        """The weights whose Parameters have no values, by the identities of these: NOTE [withheld values]."""

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
        found = next((m for m in fsdp.managed() if m.unsharded is parameter), None)
        if found is None or fsdp.obstacle(found) is not None:
            return None
        is_read = fsdp.eager_readers(found, frame, owner) is not None
        key = (id(found.parameter), (tensor.recipe, tensor.quantization, name))
        weight = self._weights.get(key)
        if weight is None or not weight.is_alive:
            if is_read:
                return None
            batch = self._batches.setdefault(id(found.group), Batch())
            weight = _kind_of(tensor)(found, KeptWeight((parameter,), tensor, store, name), batch, self)
            self._weights[key] = weight
        weight.is_read |= is_read
        self._claimed.setdefault(self._rules, {})[weight] = None
        return weight

    def use_rules(self, rules: Rules) -> None:
        """Other rules are in force: weights are gathered as they are, until ranks have agreed again."""
        self._rules, self._num_forwards = rules, 0
        for weight in self._weights.values():
            weight.is_active = False

    def begin_forward(self, trains: bool) -> None:
        """An outermost forward of the model begins, with or without gradients, on all ranks.

        Raises OptionError where FSDP2 cannot gather in FP8, and torch.distributed's errors.
        """
        root = self._root()
        if root is None:
            return
        if not self._is_checked:
            fsdp.check_model(root)
            self._is_checked = True
        self._num_forwards += 1
        self.trains = trains
        before = self._num_forwards - 1
        if before and before & (before - 1) == 0:
            self._agree(root)
        active = [w for w in self._weights.values() if w.is_active and w.is_alive]
        for weight in active:
            weight.attach()
            weight.is_read |= fsdp.hooks_of(weight.managed.group.modules[0])
            if not weight.is_in_use:
                weight.give_up()
        self.give_back()
        self._reduce_amaxes([w for w in active if w.weight.store is None and not isinstance(w, GatheredBlocks)])
        if trains:
            self._reduce_columns([w for w in active if isinstance(w, GatheredHalves) and w.may_train and w.needs_amaxes])

    def after_error(self) -> None:
        """An outermost forward has raised."""
        for weight in self._weights.values():
            if weight.is_active and weight.is_alive:
                weight.give_up()

    def after_step(self) -> None:
        """A step boundary: no backward of the step before is to come."""
        for weight in self._weights.values():
            weight.is_read_elsewhere = False
        self.give_back()

    def show(self, parameters: Iterable[object]) -> None:
        """A graph is about to read Parameters themselves."""
        for parameter in parameters if self.withheld else ():
            if id(parameter) in self.withheld and self.withheld[id(parameter)].is_here:
                self.withheld.pop(id(parameter)).show()

    def show_all(self) -> None:
        """Eager code is about to run beside a graph."""
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
                if key in agreed and weight.is_for:
                    self._activate(weight)
                    weight.take_part()
                else:
                    weight.is_active = False

    def _activate(self, weight: GatheredWeight) -> None:
        if weight.is_active:
            return
        managed = weight.managed
        if self._other_owner(managed):
            gc.collect()  # a model that was given up may be part of a cycle
            if self._other_owner(managed):
                raise OptionError(
                    f"fsdp_gather='fp8': {managed.name} is gathered in FP8 for another compiled model; give fsdp_gather to one"
                    f" of them alone"
                )
        weight.is_active = True
        batch = self._batches[id(managed.group)]
        members = {*(w for w in batch.weights if w.is_alive), weight}
        order = {id(p): i for i, p in enumerate(managed.group.fsdp_params)}
        batch.weights = sorted(members, key=lambda w: order[id(w.managed.parameter)])

    def _other_owner(self, managed: fsdp.Managed) -> bool:
        """Whether the gathers are those of another compiled model, which is still there."""
        other = getattr(getattr(managed.parameter._sharded_local_tensor, BEFORE, None), "weight", None)
        return other is not None and other.owner() not in (None, self)

    def _reduce_columns(self, weights: list[GatheredHalves]) -> None:
        """The amaxes of columns whose elements are on all ranks, of all these weights."""
        for ranks, same in _by_ranks(weights).items():
            with torch.no_grad():
                own = [
                    torch.ops.lowering.amax_rowwise([w.managed.shard.detach()], rowwise=False, columnwise=True) for w in same
                ]
                amax = largest_of_ranks([x.to(w.managed.dtype) for x, w in zip(own, same, strict=True)], ranks)
                for weight, one in zip(same, amax.split([x.numel() for x in own]), strict=True):
                    weight.amaxes = one

    def _reduce_amaxes(self, weights: list[GatheredWeight]) -> None:
        """The scales of weights that have no state; see NOTE [scales of shards]."""
        for ranks, same in _by_ranks(weights).items():
            with torch.no_grad():
                own = torch.ops.lowering.multi_amax([w.managed.shard.detach() for w in same])
                # The gathered Parameter may be rounded. Rounding keeps the order of magnitudes, so that of the largest is the
                # largest.
                amax = largest_of_ranks([x.to(w.managed.dtype) for x, w in zip(own, same, strict=True)], ranks)
                for q in dict.fromkeys(w.weight.quantization for w in same):  # as graphs compute it
                    scale, _ = torch.ops.lowering.scales_from_amax(amax, q.dtype, epsilon=q.epsilon, power_of_2=q.power_of_2)
                    for weight, one in zip(same, scale, strict=True):
                        if weight.weight.quantization == q:
                            weight.own_scale = one


def _by_ranks(weights: list[Gathering]) -> dict[Any, list[Gathering]]:
    """Those of each group of ranks, in an order that is the same on all of them."""
    found: dict[Any, list[Gathering]] = {}
    for weight in sorted(weights, key=lambda w: str(w.key)):
        found.setdefault(weight.managed.ranks, []).append(weight)
    return found


def _kind_of(tensor: WeightTensor) -> type[GatheredWeight]:
    scheme = scheme_of(tensor.quantization)
    if scheme.has_one_scale:
        return GatheredWeight
    return GatheredBlocks if scheme.has_one_copy(tensor.quantization) else GatheredHalves


def largest_of_ranks(amaxes: list[torch.Tensor], ranks: Any) -> torch.Tensor:
    """Amaxes in one float32 vector, each the largest of all ranks."""
    amax = torch.cat([x.reshape(-1).to(torch.float32) for x in amaxes])
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # as int32 the bit patterns are ordered, NaN above inf: MAX loses neither
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=ranks)
    return bits.view(torch.float32)
