"""The step boundary of several stores at once: modules of a model that are compiled one by one have a store each.

NOTE [shared memory] Stores of one recipe and device whose steps end together lie side by side in the same buffers, where one
update serves all of them. They move there at the first such boundary, when no graph is under way that reads or writes them. A
column without a staged amax is left as it is, so stores whose step goes on have theirs taken out for the time of the update.
A store that needs more room leaves, with its values, and comes back at a later boundary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fp8pass.graph.values import by_key
from fp8pass.scales.store import ALIGNMENT, Buffers, DelayedStore, has_own_functions, update

#: So many times at most a store moves: one whose steps end with others' by turns is updated on its own.
_MAX_MOVES = 8

_moves: weakref.WeakKeyDictionary[DelayedStore, int] = weakref.WeakKeyDictionary()


class SharedBuffers:
    """Buffers in which stores lie side by side. Holds no strong reference to a store."""

    def __init__(self, stores: Sequence[DelayedStore]):
        """Moves the stores here. A store sees as many entries as it had: behind its own columns begin those of the next."""
        starts, end = [], 0
        for store in stores:
            starts.append(end)
            end += -(-len(store) // ALIGNMENT) * ALIGNMENT
        first = stores[0]
        self.recipe = first.recipe
        size = max(start + store.capacity for start, store in zip(starts, stores, strict=True))
        self.buffers = Buffers.new(first.recipe.amax_history_len, size, first.device)
        self.num_columns = end
        self._members = [weakref.ref(store) for store in stores]
        for start, store in zip(starts, stores, strict=True):
            store.move_to(self.buffers.column_views(start, store.capacity), self)
            _moves[store] = _moves.get(store, 0) + 1

    @property
    def members(self) -> list[DelayedStore]:
        """The stores that moved here and that still exist, wherever they are now."""
        return [store for member in self._members if (store := member()) is not None]


def end_steps(stores: Sequence[DelayedStore], others: Sequence[DelayedStore] = ()) -> None:
    """Update all histories and scales of these stores from their staged amaxes, which ranks have made equal before: one update
    for those of one recipe and device. others: stores whose step goes on, and that no graph under way writes to."""
    if not stores:
        return
    alike = by_key(filter(len, stores), lambda store: (store.recipe, store.device))
    with torch.no_grad():
        for (recipe, device), held in alike.items():
            for store in held:
                store.note_staged()
            shared = _shared_by(held, [s for s in others if len(s) and s.recipe == recipe and s.device == device])
            if shared is None:
                for store in held:
                    update(recipe, store, len(store))
            else:
                _update_but(shared, [s for s in shared.members if s not in held])
            for store in held:
                store.version += 1


def _update_but(shared: SharedBuffers, others: Sequence[DelayedStore]) -> None:
    """One update of all columns, in which those of `others` have nothing staged."""
    rows = [store.amax_history[0, : len(store)] for store in others]
    staged = [row.clone() for row in rows]
    for row in rows:
        row.zero_()
    update(shared.recipe, shared.buffers, shared.num_columns)
    for row, values in zip(rows, staged, strict=True):
        torch.maximum(row, values, out=row)


def _shared_by(stores: Sequence[DelayedStore], others: Sequence[DelayedStore]) -> SharedBuffers | None:
    """The buffers in which these stores are, after they have moved there if need be; None where each has its own update."""
    if len(stores) == 1 or has_own_functions(stores[0].recipe):
        return None
    found = stores[0].shares
    if isinstance(found, SharedBuffers) and all(store.shares is found for store in (*stores, *found.members)):
        return found
    before = {id(store.shares) for store in stores if store.shares is not None}
    moving = [*stores, *(store for store in others if id(store.shares) in before)]
    return SharedBuffers(moving) if all(_moves.get(store, 0) < _MAX_MOVES for store in moving) else None
