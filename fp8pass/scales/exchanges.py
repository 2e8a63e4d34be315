"""Weights whose values were exchanged under delayed scaling, found by their amaxes, with one warning.

NOTE [exchanged weights] Delayed scaling quantizes a weight by the amaxes of earlier steps. An average that is copied in, merged
or loaded adapters and another checkpoint may be larger, and saturate, until a step has recorded them; none of them tells us. In
training the recorded amaxes tell: each of the first 16 step boundaries, and every 16th from there, compares the rows of the
history since the last time, so none is missed. Calls without gradients record nothing: there the Parameters themselves are
read, in the first call of a graph and in those of `is_checked`. A weight counts that more than doubles after a step in which it
hardly grew, or grows more than fourfold after two steps that recorded it: one that begins with zeros does neither. A history of
length 1 or 2 tells of fourfold growth alone. Nothing changes but for one warning. On a GPU the host does not wait for the
result: it looks at it when a later call or boundary comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from fp8pass.errors import Fp8Warning, preview, tell
from fp8pass.scales.store import DelayedStore

#: The state of a store, and for tensors of a graph the bounds that follow from it.
_Bounds = tuple[tuple[int, int, int], dict[tuple[str, ...], torch.Tensor]]

#: Calls of a graph compare its weights at least once in so many; so do step boundaries.
CHECKED_CALLS = 16


def is_checked(num_calls: int) -> bool:
    """Tell whether the call with this number, counted from 1, compares the content of its weights: mistakes show early."""
    return num_calls % CHECKED_CALLS == 0 or (1 < num_calls < CHECKED_CALLS and num_calls & (num_calls - 1) == 0)


class Arriving:
    """Booleans [n] that are copied to the host, which does not wait for them."""

    def __init__(self, values: torch.Tensor):
        self._values, self._done = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    @property
    def are_there(self) -> bool:
        """True if they have arrived."""
        return self._done is None or bool(self._done.query())

    def take(self) -> list[bool]:
        """The values; waits for them."""
        if self._done is not None:
            self._done.synchronize()
        found: list[bool] = self._values.numpy().tolist()
        return found


class Exchanges:
    """The search for exchanged weights of one compiled model: NOTE [exchanged weights]."""

    def __init__(self, model: Callable[[], nn.Module | None], strict: bool):
        self._model, self._strict = model, strict
        self._weights: weakref.WeakKeyDictionary[DelayedStore, dict[str, None]] = weakref.WeakKeyDictionary()
        self._compared: weakref.WeakKeyDictionary[DelayedStore, int] = weakref.WeakKeyDictionary()  # Boundaries until then.
        self._bounds: weakref.WeakKeyDictionary[DelayedStore, _Bounds] = weakref.WeakKeyDictionary()
        self._arriving: list[tuple[list[str], Arriving]] = []  # The tensor of each column, and whether it has grown so.
        self._is_told = False

    def watch(self, store: DelayedStore, name: str) -> None:
        """Include a tensor, which is a Parameter."""
        self._weights.setdefault(store, {})[name] = None

    def before_update(self, store: DelayedStore) -> None:
        """Compare the amaxes of the steps since the last time, that of the step that ends included."""
        if self._is_told:
            return
        self._tell()
        length, since = store.recipe.amax_history_len, store.version + 1 - self._compared.get(store, 0)
        period = CHECKED_CALLS if store.version >= CHECKED_CALLS else 1
        if since < min(period, max(1, length - 2)):
            return
        names = [name for name in self._weights.get(store, ()) if name in store]
        if not names or not _can_compare(store):
            return
        self._compared[store] = store.version + 1
        rows = torch.cat([_past(store, since + 1), store.amax_history[:1]])
        self._note(store, names, _have_jumped(rows.index_select(1, store.index_of(tuple(names)))))

    def compare(self, store: DelayedStore, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare Parameters, named by their tensors, that a call without gradients quantizes, with what was recorded."""
        if self._is_told:
            return
        self._tell()
        # Released ones, and those that FSDP2 gathered in FP8, have no bytes.
        read = {name: p for name, p in weights if type(p) is nn.Parameter and p.untyped_storage().nbytes()}
        if not read or not _can_compare(store):
            return
        with torch.inference_mode(False), torch.no_grad():
            bound = self._bound(store, tuple(read))
            values = [(p.detach(), store.entries(name)) for name, p in read.items()]
            matrices = [m for p, entries in values for m in ((p,) if entries == 1 else p.reshape(entries, -1).unbind())]
            amax = torch.stack(torch._foreach_norm(matrices, torch.inf, torch.float32))
            self._note(store, list(read), (amax > bound) & (amax < torch.inf))

    def _bound(self, store: DelayedStore, names: tuple[str, ...]) -> torch.Tensor:
        """The amax of each column up to which a weight is that of the recorded steps, or does not saturate; float32 [n]."""
        now = store.version, store.num_emptied, store.layout
        then, kept = self._bounds.get(store, (None, {}))
        if then != now:
            self._bounds[store] = now, (kept := {})
        if names not in kept:
            index = store.index_of(names)
            past = _past(store, 2).index_select(1, index)
            kept[names] = torch.maximum(_most(*past.flip(0)), store.fp8_max[index] / store.scale[index])
        return kept[names]

    def _note(self, store: DelayedStore, names: list[str], have_jumped: torch.Tensor) -> None:
        self._arriving.append(([n for n in names for _ in range(store.entries(n))], Arriving(have_jumped)))
        self._tell()

    def _tell(self) -> None:
        """Warn of what has arrived, or raise StrictError: then ranks know it at the same boundary."""
        found: dict[str, None] = {}
        while self._arriving and (self._strict or self._arriving[0][1].are_there):
            names, jumped = self._arriving.pop(0)
            found.update((name, None) for name, is_so in zip(names, jumped.take(), strict=True) if is_so)
        if not found:
            return
        self._is_told = not self._strict
        root = self._model()
        tell(
            f"{'the compiled function' if root is None else type(root).__name__}: the largest value of {preview(list(found))}"
            f" has more than doubled at once. Delayed scaling used the scale of the earlier values, so that larger ones"
            f" saturated. If weights were exchanged (an average, merged or loaded adapters, a checkpoint), load the FP8 state"
            f" that belongs to them, fp8pass.state(compiled).load_state_dict(saved), or without one call"
            f" fp8pass.state(compiled).forget_weights() after each exchange",
            Fp8Warning,
            strict=self._strict,
        )


def _can_compare(store: DelayedStore) -> bool:
    if store.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return store.device.type != "meta"


def _past(store: DelayedStore, count: int) -> torch.Tensor:
    """At most `count` rows of amaxes of finished steps, the oldest first. A history of length 1 holds none: the scale tells."""
    if store.recipe.amax_history_len == 1:
        return (store.fp8_max / store.scale)[None]
    return store.amax_history[1:][-count:]


def _have_jumped(rows: torch.Tensor) -> torch.Tensor:
    """Tell which columns of rows [steps, n], the oldest first, have grown: NOTE [exchanged weights]; bool [n]."""
    most = _most(rows[:-1]) if len(rows) < 3 else _most(rows[1:-1], rows[:-2])
    new = rows[len(rows) - len(most) :]
    return ((new > most) & (new < torch.inf)).any(dim=0)


def _most(old: torch.Tensor, older: torch.Tensor | None = None) -> torch.Tensor:
    """The most that an amax may be after `old`, which came after `older`, and not have jumped."""
    if older is None:
        return torch.where(old > 0, 4 * old, torch.inf)
    return torch.where(old < 1.5 * older, 2 * old, torch.where(older > 0, 4 * old, torch.inf))
