"""The reduction of amaxes over ranks at the step boundary: one all-reduce MAX for all tensors of a compiled model.

NOTE [the boundary collective] Ranks need not know the same tensors: experts without tokens, rank-dependent branches. So
the message has a fixed size and begins with a digest of what its sender knows. As all ranks see the largest and (negated)
the smallest digest, all of them or none find that they disagree, inside the same collective, and none is left waiting in
it. Ranks that disagree tell each other their names. A tensor of a module that a rank has, but has not run so far, is added
there in its initial state, and its amax counts as zero. What a rank cannot have is an error on every rank. Nothing is
written before the last collective has returned.

NOTE [no host wait] On a GPU, reading the digest back would drain the queue once per step. After a boundary at which ranks
agreed, the next one takes the reduced amaxes where they agree again, and zeros, which change no history, where they do not:
that is decided on the device. Whether they agreed is copied to pinned memory and read at the boundary after, whose host then
waits for a step that is long past. Then, on every rank, ranks that had disagreed talk first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.errors import AmaxReductionError, preview
from fp8pass.recipes import DelayedScaling
from fp8pass.recipes.recipe import in_words
from fp8pass.scales.exchanges import Arriving
from fp8pass.scales.store import DelayedStore

log = logging.getLogger(__name__)

MESSAGE = 4096  # Entries of the message, int32.
_HEADER = 4

Key = tuple[int, str]  # Position of the recipe among those that reduce, and the tensor's name.
Limits = dict[Key, tuple[float, int]]  # FP8_MAX and number of entries of each known tensor.


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The layout of the message. Invariant: it is equal on ranks whose headers are equal."""

    keys: tuple[Key, ...]
    limits: Limits
    header: torch.Tensor  # int32 [4]: two halves of the digest, each with its negative behind it.
    columns: tuple[torch.Tensor, ...]  # Per store, the position of each of its columns in the message.
    size: int  # Number of entries of all tensors.
    positions: dict[Key, int]  # First position of each tensor.

    @property
    def fits(self) -> bool:
        """True if one message holds all amaxes."""
        return self.size <= MESSAGE - _HEADER


class AmaxReduction:
    """The collective of one compiled model's step boundaries. Every rank of `group` calls `run` equally often."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        recipes: Sequence[DelayedScaling],
        may_quantize: Callable[[DelayedScaling, str], bool],
    ):
        self.group = group
        self.use_recipes(recipes)
        self._may_quantize = may_quantize
        self._layout: _Layout | None = None
        self._layout_of: Any = None
        self._verdict: Arriving | None = None  # Whether ranks agreed at the last boundary.
        self._may_defer = False  # Ranks agreed at the last boundary that the host saw. Invariant: equal on all ranks.

    def use_recipes(self, recipes: Sequence[DelayedScaling]) -> None:
        """The recipes of all rules so far; every rank has the same rules."""
        self.recipes = tuple(r for r in recipes if r.reduce_amax)

    @property
    def is_active(self) -> bool:
        """True if there are other ranks, and a recipe that reduces over them."""
        return bool(self.recipes) and is_distributed(self.group)

    def run(self, stores: Sequence[DelayedStore]) -> None:
        """Replace the staged amaxes of the stores by the largest over all ranks. `stores` has at least one per recipe that
        reduces. Raises AmaxReductionError on every rank if ranks quantize different tensors, and torch.distributed's errors as
        they are; no store is changed then."""
        stores = [s for s in stores if s.recipe.reduce_amax]
        known = (self.recipes, *((s, len(s), s.layout) for s in stores))  # names change with the layout
        if self._layout is None or self._layout_of != known:
            limits = {
                (self.recipes.index(store.recipe), name): (limits[store.column(name)], store.entries(name))
                for store in stores
                for limits in [store.fp8_max.tolist()]
                for name in store.names
            }
            self._layout, self._layout_of = self._make_layout(stores, limits), known
        layout = self._layout
        if self._agreed_so_far() and defers(stores[-1].device):
            self._run_deferred(layout, stores)
            return
        message = self._exchange(layout, stores)
        if not _is_agreed(message):
            layout = self._make_layout(stores, self._agreed(layout.limits))
            message = self._exchange(layout, stores)
            if not _is_agreed(message):
                raise AmaxReductionError(
                    "ranks still disagree on their tensors after they agreed: another thread runs the model"
                )
        self._write(layout, stores, message[_HEADER:])
        self._may_defer = layout.fits

    def _agreed_so_far(self) -> bool:
        """Tell whether this boundary may leave the host out; see NOTE [no host wait]. Waits for the last one."""
        verdict, self._verdict = self._verdict, None
        agreed = self._may_defer
        if agreed and verdict is not None:
            (agreed,) = verdict.take()
        if self._may_defer and not agreed:
            log.info("ranks had run different tensors before the last step boundary; that step's amaxes were left out")
        self._may_defer = False  # until this boundary has succeeded
        return agreed

    def _run_deferred(self, layout: _Layout, stores: Sequence[DelayedStore]) -> None:
        header = layout.header if layout.fits else torch.ones_like(layout.header)  # no digest: that says "disagree"
        message = torch.cat([header, self._staged(layout, stores)[: MESSAGE - _HEADER]])
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
        halves = message[:_HEADER].view(2, 2)
        agreed = (halves[:, 0] == -halves[:, 1]).all()
        amaxes = torch.where(agreed, message[_HEADER:], 0)
        missing = layout.size - amaxes.numel()
        if missing > 0:
            amaxes = torch.nn.functional.pad(amaxes, (0, missing))
        self._write(layout, stores, amaxes)
        self._verdict, self._may_defer = Arriving(agreed[None]), True

    # -- the message

    def _make_layout(self, stores: Sequence[DelayedStore], limits: Limits) -> _Layout:
        keys = tuple(sorted(limits))
        described = [in_words(r) for r in self.recipes] + [f"{key} {limits[key]}" for key in keys]
        digest = hashlib.sha256("\n".join(described).encode()).digest()
        first, second = (int.from_bytes(digest[i : i + 4], "big") >> 1 for i in (0, 4))
        header = torch.tensor([first, -first, second, -second], dtype=torch.int32, device=stores[-1].device)
        ends = list(itertools.accumulate(limits[key][1] for key in keys))
        position = {key: end - limits[key][1] for key, end in zip(keys, ends, strict=True)}
        columns = []
        for store in stores:
            starts = [(position[self.recipes.index(store.recipe), n], store.entries(n)) for n in store.names]
            where = [start + i for start, count in starts for i in range(count)]
            columns.append(torch.tensor(where, dtype=torch.int64, device=store.device))
        return _Layout(keys, limits, header, tuple(columns), ends[-1] if ends else 0, position)

    def _exchange(self, layout: _Layout, stores: Sequence[DelayedStore]) -> torch.Tensor:
        """The reduced message; of ranks that disagree only the header means anything."""
        bits = self._staged(layout, stores)
        message = torch.cat([layout.header, bits[: MESSAGE - _HEADER]])
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
        rest = bits[MESSAGE - _HEADER :]
        if rest.numel() and _is_agreed(message):
            dist.all_reduce(rest, op=dist.ReduceOp.MAX, group=self.group)
        return torch.cat([message, rest])

    def _staged(self, layout: _Layout, stores: Sequence[DelayedStore]) -> torch.Tensor:
        """This rank's amaxes as int32 bits, in the order of the layout, with zeros behind them."""
        device = stores[-1].device
        bits = torch.zeros(max(MESSAGE - _HEADER, layout.size), dtype=torch.int32, device=device)
        for store, columns in zip(stores, layout.columns, strict=True):
            staged = _bits(store).to(device)
            columns = columns.to(device)
            bits[columns] = torch.maximum(bits[columns], staged)
        return bits

    def _write(self, layout: _Layout, stores: Sequence[DelayedStore], bits: torch.Tensor) -> None:
        amaxes = bits[: layout.size].view(torch.float32)
        for store, columns in zip(stores, layout.columns, strict=True):
            store.amax_history[0, : len(columns)] = amaxes.to(store.device)[columns]
        held = {(self.recipes.index(s.recipe), name) for s in stores for name in s.names}
        for i, recipe in enumerate(self.recipes):
            store = next(s for s in reversed(stores) if s.recipe == recipe)
            added = [key for key in layout.keys if key[0] == i and key not in held]
            limits = [layout.limits[key] for key in added]
            store.add([name for _, name in added], [limit for limit, _ in limits], [entries for _, entries in limits])
            for key in added:
                first = layout.positions[key]
                store.amax_history[0, store.columns(key[1])] = amaxes[first : first + layout.limits[key][1]].to(store.device)

    # -- disagreement

    def _agreed(self, limits: Limits) -> Limits:
        """The tensors of all ranks together; raises on every rank if some rank cannot have one of them."""
        recipes = [in_words(r) for r in self.recipes]
        every = self._gather((recipes, limits))
        if any(other != every[0][0] for other, _ in every):
            described = "; ".join(f"rank {rank} has {', '.join(names)}" for rank, (names, _) in enumerate(every))
            raise AmaxReductionError(f"ranks of the amax reduction group follow different recipes: {described}. Use one recipe")
        union: Limits = {}
        for _, known in every:
            union.update(known)
        foreign = [key[1] for key in union if key not in limits and not self._may_quantize(self.recipes[key[0]], key[1])]
        foreign += [_described(key, *limits[key]) for key in limits if union[key] != limits[key]]
        refusals = self._gather(sorted(foreign))
        if any(refusals):
            lacks = "; ".join(f"rank {rank} lacks {preview(names)}" for rank, names in enumerate(refusals) if names)
            raise AmaxReductionError(
                f"ranks of the amax reduction group quantize different tensors: {lacks}, and its model has no such module"
                f" or its rules keep it in high precision. Use the same model and rules on every rank, give ranks with"
                f" other modules an amax_reduction_group of their own, or use DelayedScaling(reduce_amax=False)"
            )
        return union

    def _gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, value, group=self.group)
        return every


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    """Tell whether there is more than one rank to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def is_first_rank() -> bool:
    """Tell whether this is rank 0 of the default process group, or there is none: the rank that prints and writes."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def defers(device: torch.device) -> bool:
    """Tell whether the host had to wait for `device` to read from it."""
    return device.type == "cuda"


def _described(key: Key, limit: float, entries: int) -> str:
    return f"{key[1]} with fp8_max {limit:g}" + ("" if entries == 1 else f" and {entries} scales")


def _is_agreed(message: torch.Tensor) -> bool:
    first, minus_first, second, minus_second = message[:_HEADER].tolist()
    return first == -minus_first and second == -minus_second


def _bits(store: DelayedStore) -> torch.Tensor:
    """As int32 the bits of magnitudes are ordered, NaN above inf: MAX loses neither. The sign, even a NaN's, is cleared."""
    return store.amax_history[0, : len(store)].view(torch.int32) & 0x7FFFFFFF


def reduction_covers(amax_group: dist.ProcessGroup | None, group: Any) -> bool:
    """Tell whether the step boundary reduces amaxes over all ranks of a collective's group: then these have equal scales."""
    if amax_group is None:
        return True
    ranks = dist.get_process_group_ranks(resolve_group(group))
    return set(ranks) <= set(dist.get_process_group_ranks(amax_group))


def resolve_group(group: Any) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    if isinstance(group, dist.ProcessGroup):
        return group
    resolve: Any = dist.distributed_c10d
    return resolve._resolve_process_group(group)
