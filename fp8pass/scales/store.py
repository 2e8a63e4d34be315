"""The store: amax histories and scales of every tensor that one delayed recipe quantizes, on one device, and their update.

A graph sees fixed-size windows of `scale` and of the staging row of `amax_history`, and the slots of the module instance that
it runs for. So one compiled graph serves every layer that shares it, and all graphs of a layer share its histories by name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fp8pass.errors import RecipeError, UnknownTensorError, nearest
from fp8pass.graph.origin import TensorName
from fp8pass.inputs import InputsMissing
from fp8pass.recipes import DelayedScaling
from lowering import state as reference
from lowering import update_scales

_SMALLEST = 64
#: The number of groups of tensors whose columns are kept: a model has a few that are read together.
_MAX_INDICES = 64
#: Float32 entries in 16 bytes: CUDA graphs take a window for a static input only where its address is a multiple of that.
ALIGNMENT = 4
_SLOT_ALIGNMENT = 2  # Of int64, for the same reason.


def entries_for(num_tensors: int) -> int:
    """The entries of a window that holds so many neighbouring tensors, wherever the first of them is."""
    return num_tensors + ALIGNMENT - 1 if num_tensors else 0


def capacity_for(num_entries: int) -> int:
    """A capacity that holds `num_entries`: a power of two, so that few sizes are ever compiled for."""
    return max(_SMALLEST, 1 << max(0, num_entries - 1).bit_length())


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """The memory of a store: a column for each entry."""

    amax_history: torch.Tensor  # float32 [length of the history, entries]; row 0 is the staging row.
    scale: torch.Tensor  # float32 [entries].
    fp8_max: torch.Tensor  # float32 [entries].
    num_non_finite: torch.Tensor  # int32 [entries].
    scratch: torch.Tensor  # float32 [entries].

    @classmethod
    def new(cls, length: int, entries: int, device: torch.device) -> Buffers:
        """Buffers in their initial state, which training may use even if an evaluation in inference mode made them."""
        with torch.inference_mode(False):
            zeros, ones = (functools.partial(f, dtype=torch.float32, device=device) for f in (torch.zeros, torch.ones))
            count = zeros(entries, dtype=torch.int32)
            return cls(zeros(length, entries), ones(entries), ones(entries), count, zeros(entries))

    def column_views(self, first: int, entries: int) -> Buffers:
        """Views of neighbouring columns."""
        where = slice(first, first + entries)
        return Buffers(*(getattr(self, field.name)[..., where] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of a store that one graph receives for one module instance: tensors [capacity of the graph]."""

    scale: torch.Tensor  # float32, changed in place at step boundaries.
    amax: torch.Tensor  # float32, the staging row.
    scratch: torch.Tensor  # float32, where a call that must not record writes its amaxes.
    slots: torch.Tensor  # int64, where the graph's tensors are within the window.
    offset: int  # First entry of the store that the window shows.


Values = tuple[float, int, bool, tuple[torch.Tensor, ...]]
"""FP8_MAX, the number of entries, whether the history is empty, and copies of the history, scale and `num_non_finite`."""


class DelayedStore:
    """State of one delayed recipe on one device. Invariants: the first columns of every buffer belong to the tensors in
    `names`, in order: one each, to batched weights one per matrix, side by side. Those behind them are in their initial state,
    or belong to another store (`shared.py`). Buffers keep their addresses until `move_to` replaces them and raises `layout`."""

    def __init__(self, recipe: DelayedScaling, device: torch.device, capacity: int):
        self.recipe = recipe
        self.device = device
        self.names: list[str] = []
        self.aliases: dict[str, str] = {}
        self.restored: set[str] = set()  # Names that came from a checkpoint and that no graph has claimed yet.
        self.is_complete = False  # A checkpoint had all tensors that the rules in force quantize; until other rules follow.
        self.empty: set[str] = set()  # Names whose histories no step boundary has written yet, as far as the host knows.
        self.num_emptied = 0  # Raised whenever a name joins `empty`.
        self.started: set[str] = set()  # Tensors that scaled themselves in this step: the boundary reads their amaxes back.
        self.recorded_for: set[frozenset[tuple[str, str]]] = set()
        """(another name, the name) of tensors that were one in graphs of this step: see `merge_outgrown`."""
        self.layout = 0  # Raised whenever buffers are replaced or tensors renamed.
        self.version = 0  # Number of step boundaries so far.
        self._column: dict[str, int] = {}  # First column of each name.
        self._entries: dict[str, int] = {}
        self._frozen: tuple[int, torch.Tensor] | None = None
        self._indices: dict[tuple[str, ...], tuple[int, torch.Tensor]] = {}  # Names -> (layout, the index that was made then).
        self._slot_memory = torch.zeros(0, dtype=torch.int64, device=device), 0  # And how much of it is used.
        self._outgrown: list[tuple[int, torch.Tensor, list[int]]] = []
        """(boundaries so far, staging row, positions there by column; -1: none) of buffers that were replaced: a backward that
        was under way writes there."""
        self.shares: object = None  # The memory of several stores that the buffers are in; None where they are the store's own.
        self._take(self._new(capacity_for(capacity)))

    def _new(self, capacity: int) -> Buffers:
        return Buffers.new(self.recipe.amax_history_len, capacity, self.device)

    def _take(self, buffers: Buffers, shares: object = None) -> None:
        self.amax_history, self.scale, self.fp8_max = buffers.amax_history, buffers.scale, buffers.fp8_max
        self.num_non_finite, self._scratch = buffers.num_non_finite, buffers.scratch
        self.shares, self._frozen = shares, None
        self.layout += 1

    @property
    def capacity(self) -> int:
        """Number of entries that fit before the buffers grow."""
        return self.scale.shape[0]

    # -- tensors

    def __len__(self) -> int:
        """Number of columns in use."""
        return sum(self._entries.values())

    def __contains__(self, name: str) -> bool:
        return self.aliases.get(name, name) in self._column

    def entries(self, name: str) -> int:
        """Number of scales of a tensor: 1, or that of the matrices of batched weights."""
        return self._entries[self.aliases.get(name, name)]

    def column(self, name: str) -> int:
        """First column of a tensor by its name or by another name of a shared tensor; raises UnknownTensorError."""
        column = self._column.get(self.aliases.get(name, name))
        if column is None:
            hint = nearest(name, self.names) or " The names are in `.tensors`."
            raise UnknownTensorError(f"no tensor is called {name!r}.{hint}")
        return column

    def columns(self, *names: str) -> list[int]:
        """All columns of tensors."""
        return [first + i for name in names for first in [self.column(name)] for i in range(self.entries(name))]

    def where(self, name: str) -> int | slice:
        """The index of a tensor's values in a buffer: a number, or a slice for batched weights."""
        first, count = self.column(name), self.entries(name)
        return first if count == 1 else slice(first, first + count)

    def index_of(self, names: tuple[str, ...]) -> torch.Tensor:
        """int64 on the device: all columns of these tensors, kept with the buffers, as the host waits to make it."""
        layout, index = self._indices.get(names, (-1, None))
        if index is None or layout != self.layout:
            if len(self._indices) >= _MAX_INDICES:
                self._indices.clear()
            index = torch.tensor(self.columns(*names), dtype=torch.int64, device=self.device)
            self._indices[names] = (self.layout, index)
        return index

    def separate(self, names: Sequence[str]) -> None:
        """Let names of `names`, the tensors of one graph, that stand for another tensor be tensors again: inputs and gradients
        that were one on another way through the model, and weights that were tied and are not, as the graph has both. One of
        tied weights alone is the other."""
        taken = {name for name in names if name not in self.aliases}
        for name in (name for name in names if name in self.aliases):
            if self.aliases[name] in taken or not _is_weight(name):
                del self.aliases[name]
                self._indices.clear()
            else:
                taken.add(self.aliases[name])

    def add_alias(self, alias: str, name: str) -> None:
        """Let another name stand for a tensor, unless a graph has a tensor of that name. Tied weights are one Parameter."""
        if name in self and (alias not in self._column or _is_weight(alias)):
            self.aliases.setdefault(alias, name)

    def drop_aliases(self, is_dropped: Callable[[str], bool]) -> None:
        """Forget names that stand for another tensor where either is to be dropped; graphs that are bound add theirs."""
        self.aliases = {alias: name for alias, name in self.aliases.items() if not (is_dropped(alias) or is_dropped(name))}
        self._indices.clear()

    def add(self, names: Iterable[str], fp8_max: Iterable[float], entries: Iterable[int] | None = None) -> None:
        """Give each new name its columns in their initial state; known names keep theirs. `entries`: 1 for each if None."""
        names = list(names)
        counts = [1] * len(names) if entries is None else list(entries)
        new = {n: (m, count) for n, m, count in zip(names, fp8_max, counts, strict=True) if n not in self._column}
        needed = len(self) + sum(count for _, count in new.values())
        if needed > self.capacity:
            self.grow(needed)
        elif new and self.shares is not None:
            self.move_to(self._new(self.capacity))
        first = len(self)
        for name, (limit, count) in new.items():
            self._column[name], self._entries[name] = first, count
            self.names.append(name)
            self._note_emptied(name)
            self.fp8_max[first : first + count] = limit
            first += count

    def grow(self, capacity: int) -> None:
        """Make room for at least `capacity` entries; keeps every value."""
        self.move_to(self._new(capacity_for(max(capacity, 2 * self.capacity))))

    def move_to(self, buffers: Buffers, shares: object = None) -> None:
        """Take other buffers, in their initial state, and give them every value. shares: see the attribute."""
        old, count = self._buffers(), len(self)
        self._outgrown.append((self.version, self.amax_history[0, :count], list(range(count))))
        self._take(buffers, shares)
        for before, after in zip(old, self._buffers(), strict=True):
            after[..., :count] = before[..., :count]
        self._outgrown[-1][1].zero_()

    def merge_outgrown(self) -> None:
        """Take over amaxes that a backward has recorded in buffers that were replaced after its forward. Called before the
        staging row is read."""
        for _, row, positions in self._outgrown:
            columns = [column for column, position in enumerate(positions) if position >= 0]
            written = row[[positions[column] for column in columns]]
            self.amax_history[0, columns] = torch.maximum(self.amax_history[0, columns], written)
            row.zero_()
        # A tensor that another graph has alone gets the amaxes of graphs in which it is one with a tensor of another name.
        for other, name in sorted(pair for pair in set().union(*self.recorded_for) if pair[0] in self._column):
            if name in self._column and self._entries[other] == self._entries[name]:
                own = self.amax_history[0, self.where(other)]
                torch.maximum(own, self.amax_history[0, self.where(name)], out=own)
                self.started.add(other)

    def before_boundary(self) -> None:
        """Complete the staging row before the update. Outgrown rows are looked at until the second boundary after that."""
        self.merge_outgrown()
        self.recorded_for.clear()
        self._outgrown = [outgrown for outgrown in self._outgrown if self.version <= outgrown[0]]

    def give_up(self, names: Iterable[str]) -> None:
        """Forget tensors that another store has taken over, or that have changed; the others may get other columns."""
        gone = set(names)
        kept = [n for n in self.names if n not in gone]
        columns = self.columns(*kept)
        staging = self.amax_history[0, : len(self)]
        self._outgrown = [
            (since, row, [positions[c] if c < len(positions) else -1 for c in columns])
            for since, row, positions in (*self._outgrown, (self.version, staging, list(range(len(self)))))
        ]
        old = [buffer[..., columns] for buffer in self._buffers()]
        staging.zero_()
        self._take(self._new(self.capacity))
        for values, after in zip(old, self._buffers(), strict=True):
            after[..., : len(columns)] = values
        self.names = kept
        self.empty -= gone
        self._entries = {name: self._entries[name] for name in kept}
        ends = list(itertools.accumulate(self._entries.values()))
        self._column = {name: end - self._entries[name] for name, end in zip(kept, ends, strict=True)}

    def _buffers(self) -> tuple[torch.Tensor, ...]:
        return (self.amax_history, self.scale, self.fp8_max, self.num_non_finite)

    def rename(self, renamed: Mapping[str, str]) -> None:
        """Give tensors other names. A tensor that has one of these, and keeps its columns, gets a name that becomes free."""
        if not renamed:
            return
        earlier, names = {new: old for old, new in renamed.items()}, dict(renamed)
        for name in (name for name in earlier if name in self._column and name not in renamed):
            free = name
            while free in earlier:
                free = earlier[free]
            names[name] = free
        self.names = [names.get(n, n) for n in self.names]
        self._column, self._entries = ({names.get(n, n): v for n, v in of.items()} for of in (self._column, self._entries))
        self.empty, self.started = ({names.get(n, n) for n in of} for of in (self.empty, self.started))
        self.recorded_for = {frozenset((names.get(a, a), names.get(b, b)) for a, b in pairs) for pairs in self.recorded_for}
        self.layout += 1  # what is known by names is out of date

    def values(self, name: str) -> Values:
        """Copies of all that a tensor's columns hold."""
        history, scale, fp8_max, num_non_finite = (buffer[..., self.where(name)].clone() for buffer in self._buffers())
        limit = float(fp8_max.flatten()[0])
        return limit, self.entries(name), name in self.empty, (history, scale, num_non_finite)

    def put(self, name: str, values: Values) -> None:
        """Write what `values` returned, on any device, into a tensor's columns, which it gets if it has none. Nothing is
        written if it has another number of entries. Amaxes of the step that has not ended remain where they are larger."""
        limit, entries, is_empty, (history, scale, num_non_finite) = values
        self.add([name], [limit], [entries])
        where = self.where(name)
        if self.entries(name) != entries or float(self.fp8_max[where].flatten()[0]) != limit:
            return
        staged = self.amax_history[0, where].clone()
        self.amax_history[:, where] = history
        self.amax_history[0, where] = torch.maximum(self.amax_history[0, where], staged)
        self.scale[where] = scale
        self.num_non_finite[where] = num_non_finite
        self.started.add(name)
        if not is_empty:
            self.empty.discard(name)

    def take_from(self, other: DelayedStore, names: Sequence[str]) -> None:
        """Move the values of tensors from a store on another device, after the model moved."""
        for name in names:
            if name in other:
                self.put(name, other.values(name))

    def forget(self, names: Iterable[str]) -> None:
        """Empty the histories of tensors that have other values now; until a step records them, they scale themselves. Amaxes
        of the step that has not ended are those of the earlier values, too."""
        for name in names:
            self.amax_history[:, self.where(name)] = 0
            self.scale[self.where(name)] = 1
            for _, row, positions in self._outgrown:
                row[[positions[c] for c in self.columns(name) if c < len(positions) and positions[c] >= 0]] = 0
            self.started.discard(name)
            self._note_emptied(name)
        self._frozen = None

    # -- empty histories

    def _note_emptied(self, name: str) -> None:
        self.empty.add(name)
        self.num_emptied += 1

    def note_empty(self, names: Iterable[str]) -> None:
        """Find out which of these tensors have empty histories, after their columns were written from a checkpoint. Position 0,
        of the step that has not ended, is none of the history yet."""
        for name in list(names):
            columns = self.columns(name)
            is_empty = ~self.amax_history[1:, columns].any(dim=0) & (self.scale[columns] == 1)
            if bool(is_empty.any()):
                self._note_emptied(name)
            else:
                self.empty.discard(name)

    def note_staged(self) -> None:
        """Tensors whose staged amax is about to enter their history have an empty one no more."""
        names = [name for name in self.names if name in self.started and name in self.empty]
        self.started.clear()
        if names:
            staged = self.amax_history[0, self.columns(*names)]
            written = iter((torch.isfinite(staged) & (staged > 0)).tolist())
            full = [name for name in names if all(list(itertools.islice(written, self._entries[name])))]
            self.empty.difference_update(full)

    def needs_first_step(self, names: Iterable[str]) -> bool:
        """Tell whether one of these tensors is to take its scale from itself: its history is empty, and the recipe says so."""
        is_asked_for = self.recipe.initial_scale == "current" and self.device.type != "meta"
        return is_asked_for and not self.empty.isdisjoint(names)

    # -- scales and amaxes of calls

    def window(self, names: Sequence[str], size: int) -> Window:
        """The window of `size` entries that holds all of `names`, with their slots in it. Raises InputsMissing where no window
        of this size holds them: the graph was compiled for a smaller state."""
        columns = self.columns(*names)
        if self.capacity < size:
            self.grow(size)
        offset = 0 if max(columns, default=0) < size else min(min(columns), self.capacity - size)
        offset -= offset % ALIGNMENT
        if columns and max(columns) - offset >= size:
            raise InputsMissing(entries=max(columns) + 1)
        shown, slots = slice(offset, offset + size), self._slots([column - offset for column in columns], size)
        return Window(self.scale[shown], self.amax_history[0, shown], self._scratch[shown], slots, offset)

    def _slots(self, slots: list[int], size: int) -> torch.Tensor:
        """int64 [size] that begins with these slots: a part of memory in which those of many instances lie side by side, as a
        graph reads no more of it than its own. A model has thousands of instances where Python loops over experts."""
        memory, used = self._slot_memory
        if used + size > len(memory):
            with torch.inference_mode(False):
                memory, used = torch.zeros(2 * size, dtype=torch.int64, device=self.device), 0
        end = used + len(slots)
        memory.data[used:end] = torch.tensor(slots, dtype=torch.int64)  # a backward that is to come reads other parts
        self._slot_memory = memory, end + end % _SLOT_ALIGNMENT
        return memory[used : used + size]

    def marked(self, scale: torch.Tensor, names: Iterable[str]) -> torch.Tensor:
        """A copy of scales [capacity] with 0 for those of these tensors whose histories are empty."""
        empty = tuple(name for name in names if self.aliases.get(name, name) in self.empty)
        return scale.index_fill(0, self.index_of(empty), 0.0)

    def grown(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales that were copied earlier, as long as the buffers are now: tensors that came since have their present ones."""
        return scale if len(scale) == self.capacity else torch.cat([scale, self.scale[len(scale) :]])

    def frozen_scale(self) -> torch.Tensor:
        """A copy of the scales as they are now; the same tensor until the next step boundary."""
        if self._frozen is None or self._frozen[0] != self.version or self._frozen[1].shape != self.scale.shape:
            self._frozen = (self.version, self.scale.clone())
        return self._frozen[1]


def _is_weight(name: str) -> bool:
    return TensorName.parse(name).kind == "weight"


def has_own_functions(recipe: DelayedScaling) -> bool:
    """Tell whether functions of the user's compute the scales of a recipe."""
    return not isinstance(recipe.amax_compute_algo, str) or recipe.scaling_factor_compute_algo is not None


def update(recipe: DelayedScaling, buffers: Buffers | DelayedStore, count: int) -> None:
    """Update the histories and scales of the first `count` columns at once, from their staged amaxes."""
    history, scale = buffers.amax_history[:, :count], buffers.scale[:count]
    limits, num_non_finite = buffers.fp8_max[:count], buffers.num_non_finite[:count]
    algo = recipe.amax_compute_algo
    if isinstance(algo, str) and not has_own_functions(recipe):
        update_scales(history, scale, limits, algo=algo, margin=recipe.margin, num_non_finite=num_non_finite)
        return
    staged = history[0].clone()
    rolled, window = reference.rolled_history(history)
    if callable(recipe.amax_compute_algo):
        amax = _checked(recipe.amax_compute_algo(window.clone()), "amax_compute_algo", staged)
    else:
        amax = window.amax(dim=0) if recipe.amax_compute_algo == "max" else staged
    if recipe.scaling_factor_compute_algo is not None:
        new_scale = recipe.scaling_factor_compute_algo(amax.clone(), scale.clone(), limits.clone(), recipe)
        new_scale = _checked(new_scale, "scaling_factor_compute_algo", staged)
    else:
        new_scale = reference.scale_of(amax, limits, recipe.margin)
    reference.update_from_amax(history, rolled, scale, staged, amax, new_scale, num_non_finite)


def _checked(value: object, option: str, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecipeError(
            f"{option} returned {got}; it must return a tensor of shape {tuple(like.shape)}, one entry per tensor"
        )
    return value.to(device=like.device, dtype=like.dtype)
