"""`state(compiled)`: the user's view of the state of delayed scaling, and its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist

from fp8pass.capture.instances import module_paths
from fp8pass.capture.session import Session
from fp8pass.errors import CheckpointMismatchError, UnknownTensorError, nearest, preview
from fp8pass.graph.names import TensorName
from fp8pass.state import checkpoint
from fp8pass.state.reduction import is_distributed
from fp8pass.state.store import DelayedStore


class Fp8State:
    """Scales and amax histories of every tensor quantized with delayed scaling; a `torch.distributed.checkpoint` Stateful.

    Names are `<module path>:<input|weight|grad_output>`, the same in every process. A tensor that several GEMMs share is
    named after the first one; the names after the other ones are accepted too.
    """

    def __init__(self, session: Session):
        self._session = session

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors, in the order in which graphs first quantized them."""
        return list(dict.fromkeys(name for store in self._stores() for name in store.names))

    def scale(self, name: str) -> torch.Tensor:
        """The factor by which the tensor will be multiplied when it is next quantized: a float32 scalar, [n] for n batched
        weights. A copy."""
        store = self._store(name)
        return store.scale[store.where(name)].clone()

    def amax_history(self, name: str) -> torch.Tensor:
        """[amax_history_len] float32, of n batched weights [amax_history_len, n], a copy: the staging entry first, then
        amaxes from the oldest to the newest."""
        store = self._store(name)
        return store.amax_history[:, store.where(name)].clone()

    def num_non_finite(self, name: str | None = None) -> int:
        """How often the amax of the tensor, or of any tensor, was inf or NaN at the end of a step, so that its history was not
        updated. Two tensors in one step count twice, and so do two matrices of batched weights."""
        if name is None:
            return sum(int(store.num_non_finite[: len(store)].sum()) for store in self._stores())
        store = self._store(name)
        return int(store.num_non_finite[store.where(name)].sum())

    def step(self) -> None:
        """End the step: the amaxes recorded since the last step boundary enter the histories, and new scales are computed.

        With `step="manual"`, call it once per optimizer step; where amaxes are reduced, on every rank of the group. A step
        in which no amax was recorded changes nothing.
        """
        if self._session.clock.recorded or self._session.reduction.is_active:
            self._session.end_step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state as a flat dict of plain tensors, which are copies: for torch.save (and torch.load with weights_only),
        safetensors and torch.distributed.checkpoint."""
        saved: dict[str, torch.Tensor] = {}
        for store in self._stores():
            saved.update(checkpoint.save_store(store, self._ranks(store)))
        if saved:
            saved[checkpoint.RECORDED] = torch.tensor(self._session.clock.is_step_pending)
        if self._session.rules.stateful:
            saved[checkpoint.NUM_TENSORS] = torch.tensor(len(self.tensors))
        return saved

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state, before or after the first call of the compiled model.

        Raises CheckpointMismatchError, and changes nothing, if it does not fit: other tensors, another history length or
        another format. Before the first call the model's tensors are not known yet; then module paths are checked now and
        tensors when the first graph is bound.
        """
        saved = checkpoint.read_entries(state_dict, dist.get_rank() if is_distributed(None) else 0)
        names = checkpoint.names_in(saved)
        num_saved = int(state_dict.get(checkpoint.NUM_TENSORS, len(names)))
        if not names and num_saved:
            raise CheckpointMismatchError(
                f"the checkpoint holds {num_saved} tensors and none of them was read: torch.distributed.checkpoint reads"
                f" what state_dict() names, and before its first call this model has no tensors. Use"
                f" state(compiled).load_checkpoint(checkpoint_id), or load after a forward and a backward"
            )
        if not names and not self.tensors:
            return
        placed = self._place(names)
        known = [n for n in self.tensors if not self._is_restored(n)]
        if known:
            checkpoint.check_names(names, self.tensors)
        else:
            self._check_modules(names)
        for store, held in placed.items():
            checkpoint.check_entries(store, saved, held)
        for store, held in placed.items():
            checkpoint.load_store(store, saved, held)
        self._session.clock.set_pending(bool(state_dict.get(checkpoint.RECORDED, True)))

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "fp8") -> None:
        """Continue from what `torch.distributed.checkpoint.save({key: state(compiled), ...})` wrote, on any number of
        ranks.

        For a model that has not run yet: `torch.distributed.checkpoint.load` reads only the tensors that a model names, and
        it has none. Every rank reads by itself, without communication. Raises CheckpointMismatchError as
        `load_state_dict` does.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(checkpoint_id)
        found = reader.read_metadata().state_dict_metadata
        saved = {
            name.removeprefix(f"{key}."): torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in found.items()
            if name.startswith(f"{key}.") and isinstance(entry, TensorStorageMetadata)
        }
        if not saved:
            raise CheckpointMismatchError(f"{checkpoint_id} has no entries under {key!r}; pass the key that it was saved under")
        with warnings.catch_warnings():
            # Reading alone is intended here, whether or not there is a process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({key: saved}, storage_reader=reader, no_dist=True)
        self.load_state_dict(saved)

    def __repr__(self) -> str:
        return f"Fp8State({len(self.tensors)} tensors: {preview(self.tensors, 4)})"

    def _ranks(self, store: DelayedStore) -> checkpoint.Ranks:
        if not is_distributed(None):
            return checkpoint.Ranks()
        group = self._session.reduction.group
        is_shared = store.recipe.reduce_amax and (group is None or dist.get_world_size(group) == dist.get_world_size())
        return checkpoint.Ranks(dist.get_rank(), is_shared, self._session.reduction.is_active)

    def _stores(self) -> list[DelayedStore]:
        return [s for s in self._session.stores if len(s)]

    def _store(self, name: str) -> DelayedStore:
        for store in self._stores():
            if name in store:
                return store
        may_come = self._session.rules.stateful and not self._session.uses
        missing = "none yet: run a forward first" if may_come else "none: only tensors under delayed scaling have a state"
        hint = nearest(name, self.tensors) or f" There are {preview(self.tensors) or missing}."
        raise UnknownTensorError(f"no tensor is called {name!r}.{hint}")

    def _is_restored(self, name: str) -> bool:
        return any(name in store.restored for store in self._stores())

    def _place(self, names: list[str]) -> dict[DelayedStore, list[str]]:
        """The store that each saved tensor belongs to; the rules tell where no graph has claimed it."""
        if not self._session.rules.stateful:
            raise CheckpointMismatchError(
                f"the saved state holds {len(names)} tensors of delayed scaling; this model's recipe keeps no state"
            )
        placed: dict[DelayedStore, list[str]] = {}
        for name in names:
            store = next((s for s in self._stores() if name in s), None)
            store = store or self._session.stores.expected_store(TensorName.parse(name))
            placed.setdefault(store, []).append(name)
        return placed

    def _check_modules(self, names: list[str]) -> None:
        root = self._session.root()
        if root is None:
            return
        modules = module_paths(root)
        foreign = [n for n in names if TensorName.parse(n).module not in modules]
        if foreign:
            raise CheckpointMismatchError(
                f"the saved state does not fit this model: it has no modules for {preview(foreign)}."
                f" The state was left as it was"
            )
