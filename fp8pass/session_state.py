"""The state of one compiled model or part of one: its tensors by name, as a state dict and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from fp8pass.errors import CheckpointMismatchError, preview
from fp8pass.graph.names import TensorName
from fp8pass.runtime.instances import module_paths
from fp8pass.runtime.session import Session
from fp8pass.state import checkpoint
from fp8pass.state.reduction import is_distributed
from fp8pass.state.store import DelayedStore


class SessionState:
    """The tensors of one session, by their names in its own model."""

    def __init__(self, session: Session):
        self.session = session

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order in which graphs first quantized them."""
        return list(dict.fromkeys(name for store in self.stores() for name in store.names))

    def stores(self) -> list[DelayedStore]:
        """The stores that hold tensors."""
        return [s for s in self.session.stores if len(s)]

    def store_of(self, name: str) -> DelayedStore | None:
        """The store that holds a tensor, whatever name of it is given."""
        return next((store for store in self.stores() if name in store), None)

    def step(self) -> None:
        """End the step, if there is one."""
        if self.session.clock.is_step_pending or self.session.reduction.is_active:
            self.session.end_step()

    def forget_weights(self) -> None:
        """Empty the histories of weights."""
        with self.session.stores.lock:
            for store in self.stores():
                store.forget([name for name in store.names if TensorName.parse(name).kind == "weight"])

    def save(self) -> dict[str, torch.Tensor]:
        """Copies of what is held of each tensor, by `checkpoint.Entry`."""
        saved: dict[str, torch.Tensor] = {}
        for store in self.stores():
            saved.update(checkpoint.save_store(store, self._ranks(store)))
        return saved

    def check(self, state_dict: Mapping[str, torch.Tensor], recorded: bool) -> Callable[[], None]:
        """Check the entries of these tensors; what is returned loads them.

        recorded: whether amaxes were recorded since the last step boundary when the state was saved. Raises
        CheckpointMismatchError if the entries do not fit.
        """
        saved = checkpoint.read_entries(state_dict, dist.get_rank() if is_distributed(None) else 0)
        names = checkpoint.names_in(saved)
        if not names and not self.names:
            return lambda: self.session.clock.set_pending(recorded and bool(self.session.schedule))
        placed = self._place(names)
        known = [n for n in self.names if not self._is_restored(n)]
        if known:
            checkpoint.check_names(names, self.names)
        else:
            self._check_modules(names)
        for store, held in placed.items():
            checkpoint.check_entries(store, saved, held)

        def load() -> None:
            for store, held in placed.items():
                checkpoint.load_store(store, saved, held)
            self.session.clock.set_pending(recorded)

        return load

    def _ranks(self, store: DelayedStore) -> checkpoint.Ranks:
        if not is_distributed(None):
            return checkpoint.Ranks()
        group = self.session.reduction.group
        is_shared = store.recipe.reduce_amax and (group is None or dist.get_world_size(group) == dist.get_world_size())
        return checkpoint.Ranks(dist.get_rank(), is_shared, self.session.reduction.is_active)

    def _is_restored(self, name: str) -> bool:
        return any(name in store.restored for store in self.stores())

    def _place(self, names: list[str]) -> dict[DelayedStore, list[str]]:
        """The store that each saved tensor belongs to; the rules tell where no graph has claimed it."""
        if not self.session.stores.recipes:
            raise CheckpointMismatchError(
                f"the saved state holds {len(names)} tensors of delayed scaling; this model's recipe keeps no state"
            )
        placed: dict[DelayedStore, list[str]] = {}
        for name in names:
            store = self.store_of(name) or self.session.stores.expected_store(TensorName.parse(name))
            placed.setdefault(store, []).append(name)
        return placed

    def _check_modules(self, names: list[str]) -> None:
        root = self.session.root()
        if root is None:
            return
        modules = module_paths(root)
        foreign = [n for n in names if TensorName.parse(n).module not in modules]
        if foreign:
            raise CheckpointMismatchError(
                f"the saved state does not fit this model: it has no modules for {preview(foreign)}."
                f" The state was left as it was"
            )
