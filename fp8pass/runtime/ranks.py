"""Ranks that train one model together must compile it alike: recipe, rules and options are compared before the first step.

NOTE [who is compared] Models of one class, with Parameters of the same names and shapes, in the order of their first forward
with gradients. A model that shows over which ranks it is trained, by DDP, by FSDP or by DTensor Parameters, is compared over
these, others over all ranks of the default group. Stages of a pipeline are compared with the same stage alone. Where ranks that
differ are known to compute together, because the model shows it or because one of them reduces amaxes over the other, that is
an error; where that is not known, a warning.

NOTE [no collective] Ranks compare through the store of the default process group, so a rank that never trains a model keeps no
other rank in a collective. The first rank leaves its words there, every other one compares its own with them, and one that
differs leaves its own beside them. A rank waits for the others, for a while, only where a collective would wait for them
anyway: before the first forward of a model that shows its ranks, and before the first reduction of amaxes. Otherwise the first
rank looks again at step boundaries.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fp8pass.errors import Fp8Warning, RankMismatchError, UnsupportedError, tell
from fp8pass.options import CompileOptions, StepMode
from fp8pass.recipes import Recipe
from fp8pass.recipes.recipe import in_words
from fp8pass.rules import Rules
from fp8pass.runtime.clock import stage_on_stack
from fp8pass.scales.reduction import AmaxReduction, is_distributed

log = logging.getLogger(__name__)

#: A rank that comes later has its error at its own first forward.
PATIENCE = datetime.timedelta(seconds=30)
#: From this step boundary on, a rank looks no more.
_LAST_LOOK = 1024

_ORDER = "the order of "

Store = Any  # torch.distributed's, which torch does not export.

Words = dict[str, str]  # Name of an argument of `fp8_compile` -> its value, in words that are the same in every process.


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """One rank's description of its model."""

    rank: int
    words: Words
    reduces_over: list[int]  # The ranks over which amaxes are reduced; empty where none are.

    def differences(self, other: RankRecord) -> list[str]:
        """The differences, with both values."""
        mine, theirs = dict(self.words), dict(other.words)
        if self.reduces_over and other.reduces_over and self.reduces_over != other.reduces_over and self.is_tied_to(other):
            mine["amax_reduction_group"], theirs["amax_reduction_group"] = (
                f"ranks {', '.join(map(str, r.reduces_over))}" for r in (self, other)
            )
        names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
        found = []
        for name in [n for n in names if not n.startswith(_ORDER)] or names:
            here, there = mine.get(name, "not given"), theirs.get(name, "not given")
            found.append(f"{name} is {here} on rank {self.rank} and {there} on rank {other.rank}")
        return found

    def is_tied_to(self, other: RankRecord) -> bool:
        """True if one of the two reduces amaxes over the other."""
        return other.rank in self.reduces_over or self.rank in other.reduces_over

    def to_json(self) -> str:
        """The record as a text."""
        return json.dumps(dataclasses.asdict(self))


class RankComparison:
    """The comparison of one compiled model with those of other ranks."""

    def __init__(
        self,
        root: Callable[[], nn.Module | None],
        words: Callable[[], Words],
        reduction: AmaxReduction,
        join: JoinGuard,
        is_strict: bool,
    ):
        self._root, self._words, self._reduction, self._is_strict = root, words, reduction, is_strict
        self._guard = join
        self._group: int | None = None  # The default process group in which it was compared.
        self._joined: int | None = None  # The one in which the others know that this rank takes part in reductions.
        self._key = self._members = ""  # Keys in the store: about this model, and about the ranks that reduce amaxes.
        self._record: RankRecord | None = None
        self._ranks: list[int] = []  # The ranks that the model itself shows.
        self._is_watching = False  # True if ranks may still come that differ.
        self._is_complete = False  # True if no other rank may differ once all that are expected have come.
        self._num_boundaries = 0

    def before_training(self) -> None:
        """Compare before a forward with gradients. Raises RankMismatchError where another rank differs."""
        group = _default_group()
        if group is None or group == self._group:
            return
        store = _store()
        if store is None:
            return
        try:
            self._begin(store)
            if self._ranks and self._is_watching and self._guard.uneven("auto") is None:
                self._wait(store, [f"{self._key}/all"])
                self._look(store)
        except dist.DistError as error:
            log.info("the store of the default process group failed, so ranks are not compared: %s", error)
            self._is_watching = False
        self._group = group  # after an error, the next forward raises it again

    def before_boundary(self) -> None:
        """Compare before the end of a step, which may reduce amaxes. Raises RankMismatchError where another rank differs."""
        group = _default_group()
        is_new = self._reduction.is_active and self._joined != group
        if group is None or not (is_new or (self._is_watching and group == self._group)):
            return
        self._num_boundaries += 1
        count = self._num_boundaries
        store = _store()
        if store is None or (count & (count - 1) and not is_new):
            return
        try:
            self._join(store)
            if not self._is_watching:
                return
            if count == 1 and self._reduction.is_active:
                self._wait(store, [f"{self._key}/all", f"{self._members}/all"])
            self._look(store)
        except dist.DistError as error:
            log.info("the store of the default process group failed: %s", error)
            self._is_watching = False
        self._is_watching &= count < _LAST_LOOK

    def _begin(self, store: Store) -> None:
        if self._record is None or self._group is not None:
            reduces_over = _ranks_of(self._reduction.group) if self._reduction.is_active else []
            self._record = RankRecord(dist.get_rank(), self._words(), reduces_over)
            self._ranks = _ranks_of_model(self._root())
            self._key = _numbered(_described(self._root(), self._ranks))
        self._join(store)
        self._num_boundaries = 0
        own = self._record
        first = RankRecord(**json.loads(store.compare_set(f"{self._key}/first", "", own.to_json())))
        if first.differences(own):
            store.set(f"{self._key}/other", own.to_json())
            store.set(f"{self._key}/all", "some differ")
            self._report(first)
        self._is_watching = True
        expected = len(self._ranks or own.reduces_over) or dist.get_world_size()
        if store.add(f"{self._key}/count", 1) == expected:
            store.set(f"{self._key}/all", "equal")
        self._is_complete = bool(self._ranks) or expected == dist.get_world_size()

    def _join(self, store: Store) -> None:
        """Tell the others that this rank takes part in reductions, with or without a forward, so that none waits for one."""
        if self._joined == _default_group() or not self._reduction.is_active:
            return
        ranks, self._joined = _ranks_of(self._reduction.group), _default_group()
        self._members = _numbered(f"reduces {ranks}")
        if store.add(f"{self._members}/count", 1) == len(ranks):
            store.set(f"{self._members}/all", "reduce")

    def _look(self, store: Store) -> None:
        """Raise or warn if a rank that came later differs."""
        assert self._record is not None
        if store.check([f"{self._key}/other"]):
            self._is_watching = False
            self._report(RankRecord(**json.loads(store.get(f"{self._key}/other"))))
        elif self._is_complete and store.check([f"{self._key}/all"]):
            self._is_watching = False

    def _wait(self, store: Store, keys: list[str]) -> None:
        """Wait until one of the keys is there, or patience ends."""
        end, pause = time.monotonic() + PATIENCE.total_seconds(), 0.001
        while not any(store.check([key]) for key in keys):
            if time.monotonic() > end:
                log.info("not all ranks began a forward of this model within %s s; they are compared later", PATIENCE.seconds)
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _report(self, other: RankRecord) -> None:
        own = self._record
        assert own is not None
        found = "; ".join(sorted([own, other], key=lambda r: r.rank)[0].differences(max(own, other, key=lambda r: r.rank)))
        if self._ranks or own.is_tied_to(other):
            self._group = None
            raise RankMismatchError(
                f"ranks {min(own.rank, other.rank)} and {max(own.rank, other.rank)} train one model together and compile it"
                f" differently: {found}. Compile it with the same recipe, rules and options on every rank"
            )
        if own.rank != other.rank:
            tell(
                f"a model of the same class and shapes is compiled differently on other ranks: {found}. If these ranks train it"
                f" together, compile it with the same recipe, rules and options on every rank",
                Fp8Warning,
                strict=self._is_strict,
            )


def words_of(rules: Rules, options: CompileOptions, step: StepMode) -> Words:
    """Everything among the arguments of `fp8_compile` that decides about graphs, or about what ranks do together."""
    found = {
        **rule_words(rules),
        "step": repr(step),
        **options.in_words(),
        "mode and options": repr(dict(sorted(options.patches.items()))),
    }
    for at, later in options.later_rules:
        found |= _each_rule(later, f"schedule[{at}]")
    return found


def rule_words(rules: Rules) -> Words:
    """Everything in rules that decides about graphs, in words that are the same in every process."""
    default = {"recipe": _recipe(rules.default), "select": repr(rules.select), "min_speedup": repr(rules.min_speedup)}
    return {**default, **_each_rule(rules, "rules")}


def _each_rule(rules: Rules, where: str) -> Words:
    found = {f"{where}[{rule.pattern!r}]": _recipe(rule.recipe) for rule in rules.rules}
    return {**found, _ORDER + where: ", ".join(repr(rule.pattern) for rule in rules.rules)}


def _recipe(recipe: Recipe | None) -> str:
    return "None" if recipe is None else in_words(recipe, changed_only=True)


# -- the default process group

_numbers: Counter[tuple[int | None, str]] = Counter()  # Per default process group, how many of a description were compared.
_group_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Numbers of default process groups. Their `id` would not do: a group that is made again may have that of one destroyed before,
on one rank and not on another."""
_next_number = itertools.count()


def _default_group() -> int | None:
    """The number of the default process group of several ranks in several processes; None where there is none."""
    if not is_distributed(None) or dist.get_backend() == "fake":
        return None
    group = dist.group.WORLD
    assert group is not None
    return _group_numbers.setdefault(group, next(_next_number))


def _store() -> Store | None:
    """The store of the default process group; None for a backend without one, such as MPI."""
    c10d: Any = dist.distributed_c10d
    found = c10d._get_default_store() if hasattr(c10d, "_get_default_store") else None
    return None if found is None else c10d.PrefixStore("fp8pass", found)


def _numbered(description: str) -> str:
    number = (_default_group(), description)
    _numbers[number] += 1
    return f"{hashlib.sha256(description.encode()).hexdigest()[:32]}/{_numbers[number]}"


# -- the ranks that a model is trained over


def _described(model: nn.Module | None, ranks: list[int]) -> str:
    """A text that is equal on ranks that train one model: see NOTE [who is compared]."""
    stage = stage_on_stack()
    named = [] if model is None else list(model.named_parameters())
    parameters = [f"{name} {() if is_lazy(p) else tuple(p.shape)}" for name, p in named]
    return "\n".join([type(model).__qualname__, f"stage {getattr(stage, 'stage_index', None)}", f"ranks {ranks}", *parameters])


def _ranks_of_model(model: nn.Module | None) -> list[int]:
    """The ranks that DDP, FSDP or DTensor Parameters show; empty where nothing does."""
    found: set[int] = set()
    for module in (DistributedDataParallel._get_active_ddp_module(), *(() if model is None else model.modules())):
        group = getattr(module, "process_group", None)
        found |= {*_ranks_of(group)} if isinstance(group, dist.ProcessGroup) else set()
    meshes: Iterable[Any] = () if model is None else (getattr(p, "device_mesh", None) for p in model.parameters())
    for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values():
        found |= {*mesh.mesh.flatten().tolist()}
    return sorted(found) if len(found) > 1 else []


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return sorted(dist.get_process_group_ranks(group or dist.group.WORLD))


class JoinGuard:
    """The refusal of step boundaries at which other ranks are missing: under torch's `Join` ranks go on that have more batches.
    `Join` says nothing of its end, but DDP then notes the rank whose Parameters all others receive. Before the first forward
    under a `Join` that note, which DDP does not read again, is taken away."""

    def __init__(self, root: Callable[[], nn.Module | None]):
        self._root = root
        self._inner: list[weakref.ref[nn.Module]] | None = None  # The DDP modules in the model.
        self._joined: Callable[[], nn.Module | None] = lambda: None  # The DDP module of the last forward under such a `Join`.

    def uneven(self, mode: StepMode) -> nn.Module | None:
        """The DDP module whose `Join` lets ranks go on that have more batches than others, so that these end more steps. A
        `Join` that stops all of them does so at DDP's forward, before which automatic steps may end: there it counts, too."""
        root = self._root()
        if self._inner is None and root is not None:
            self._inner = [weakref.ref(m) for m in root.modules() if isinstance(m, DistributedDataParallel)]
        active: nn.Module | None = DistributedDataParallel._get_active_ddp_module()
        for ddp in (active, *(inner() for inner in self._inner or ())):
            config: Any = getattr(ddp, "_join_config", None)
            stops_all = config is not None and config.throw_on_early_termination and (ddp is active or mode == "manual")
            if config is not None and config.enable and not stops_all:
                return ddp
        return None

    def before_forward(self, mode: StepMode) -> None:
        """Raise UnsupportedError where the forward is under a `Join` and would end a step by itself."""
        uneven = self.uneven(mode)
        if uneven is not None and mode == "auto":
            raise UnsupportedError(
                f"{_JOIN} automatic steps, which at each forward reduce amaxes or numbers of a monitor over all ranks. Use"
                f" step='manual' and call {_AFTER_JOIN}"
            )
        if uneven is not None:
            if _joins.get(uneven) is not uneven._join_config:
                vars(uneven).pop(_END_OF_JOIN, None)
                _joins[uneven] = uneven._join_config
            self._joined = weakref.ref(uneven)

    def before_boundary(self) -> None:
        """Raise UnsupportedError where a step would end while a `Join` goes on."""
        joined = self._joined()
        if joined is not None and _joins[joined] is joined._join_config and _END_OF_JOIN not in vars(joined):
            raise UnsupportedError(
                f"{_JOIN} state(model).step(), which reduces amaxes or numbers of a monitor over all ranks. Call {_AFTER_JOIN}"
            )


_joins: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # The last `Join`'s object in a DDP module.
_END_OF_JOIN = "_authoritative_rank"
_JOIN = "under torch.distributed's Join a rank with fewer batches takes part in the collectives of DDP, but not in those of"
_AFTER_JOIN = "state(model).step() on every rank after the Join, or use DelayedScaling(reduce_amax=False) and no monitor"
