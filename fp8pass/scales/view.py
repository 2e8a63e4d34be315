"""`state(compiled)`: the user's view of the state of delayed scaling, and its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.errors import CheckpointMismatchError, UnknownTensorError, nearest, preview
from fp8pass.graph.names import TensorName
from fp8pass.runtime.instances import module_paths
from fp8pass.runtime.session import Part, Session, part_of
from fp8pass.scales import checkpoint
from fp8pass.scales.reduction import is_distributed
from fp8pass.scales.store import DelayedStore


class Fp8State:
    """Scales and amax histories of every tensor quantized with delayed scaling; a `torch.distributed.checkpoint` Stateful.

    Names are `<module path>:<input|weight|grad_output>`, the same in every process. A tensor that several GEMMs share is
    named after the first one; the names after the other ones are accepted too. Where modules of a model were compiled one by
    one, it is the state of all of them, by their paths in the model.
    """

    def __init__(self, parts: Sequence[Part]):
        self._parts = tuple(parts)

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors, in the order in which graphs first quantized them."""
        return [_renamed(name, part.outer) for part in self._parts for name in _names(part.session)]

    def scale(self, name: str) -> torch.Tensor:
        """The factor by which the tensor will be multiplied when it is next quantized: a float32 scalar, [n] for n batched
        weights. A copy. Raises UnknownTensorError if no tensor has this name."""
        store, where = self._find(name)
        return store.scale[where].clone()

    def amax_history(self, name: str) -> torch.Tensor:
        """[amax_history_len] float32, of n batched weights [amax_history_len, n], a copy: the staging entry first, then
        amaxes from the oldest to the newest. Raises UnknownTensorError if no tensor has this name."""
        store, where = self._find(name)
        return store.amax_history[:, where].clone()

    def num_non_finite(self, name: str | None = None) -> int:
        """The number of times that the amax of the tensor, or of any tensor, was inf or NaN at the end of a step, so that its
        history was not updated. Two tensors in one step count twice, and so do two matrices of batched weights. Raises
        UnknownTensorError if no tensor has this name."""
        if name is None:
            stores = [store for part in self._parts for store in _stores(part.session)]
            return sum(int(store.num_non_finite[: len(store)].sum()) for store in stores)
        store, where = self._find(name)
        return int(store.num_non_finite[where].sum())

    def step(self) -> None:
        """End the step: the amaxes recorded since the last step boundary enter the histories, and new scales are computed.

        With `step="manual"`, call it once per optimizer step; where amaxes are reduced, on every rank of the group. A step
        in which no amax was recorded changes nothing.
        """
        for session in self._sessions:
            if session.clock.is_step_pending or session.reduction.is_active:
                session.end_step()

    def refresh_weights(self) -> None:
        """Quantize all weights again before they are next used, whose FP8 copies are kept between calls (`weight_copies`).

        Needed with `weight_copies="cache"` alone, after a write that leaves no trace: through `.data`, by a fused operation
        called by hand, or through a NumPy or DLPack view, to a weight that does not train or in the middle of a step. Changes
        in place, new storages, optimizer steps and loaded state dicts are seen without it.
        """
        for session in self._sessions:
            session.weights.cache.renew(frozen=True)

    def forget_weights(self) -> None:
        """Empty the amax histories of all weights, which have other values now: an average, merged adapters, a checkpoint
        without FP8 state. Each takes its scale from itself until a step of training has recorded it.

        Without it, delayed scaling quantizes weights by the largest amax of the last `amax_history_len` steps, and larger
        values saturate. `load_state_dict` does the same and more where the state of the weights was saved.
        """
        for session in self._sessions:
            with session.stores.lock:
                for store in _stores(session):
                    store.forget([name for name in store.names if TensorName.parse(name).kind == "weight"])

    def restore_weights(self) -> None:
        """Give Parameters that `release_frozen=True` took the values of their values again: those that their FP8 copies stand
        for, rounded to the Parameter's dtype.

        Until the next call of the compiled model, which takes those that are frozen still. The copies stay as they are.
        """
        for session in self._sessions:
            session.weights.releases.restore()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state as a flat dict of plain tensors, which are copies: for torch.save (and torch.load with weights_only),
        safetensors and torch.distributed.checkpoint."""
        saved: dict[str, torch.Tensor] = {}
        for part in self._parts:
            saved |= {_renamed(key, part.outer): value for key, value in _saved(part.session).items()}
        if saved or self._is_scheduled:
            saved[checkpoint.NUM_STEPS] = torch.tensor(max(session.num_steps for session in self._sessions))
            saved[checkpoint.RECORDED] = torch.tensor(any(session.clock.is_step_pending for session in self._sessions))
        if self._is_stateful:
            saved[checkpoint.NUM_TENSORS] = torch.tensor(len(self.tensors))
        return saved

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state, before or after the first call of the compiled model.

        Raises CheckpointMismatchError, and changes nothing, if it does not fit: other tensors, another history length or
        another format, or nothing at all under a recipe with state. Before the first call the model's tensors are not known
        yet; then module paths are checked now and tensors when the first graph is bound.
        """
        entries = {key: value for key, value in state_dict.items() if key not in checkpoint.OF_NO_TENSOR}
        self._check_not_empty(state_dict, len(entries))
        num_steps = self._num_steps(state_dict)
        split = self._split(entries)
        recorded = bool(state_dict.get(checkpoint.RECORDED, True))
        before = [session.go_to(num_steps) for session in self._sessions]
        try:
            loads = [self._check_part(part, held, recorded) for part, held in zip(self._parts, split, strict=True)]
        except CheckpointMismatchError:
            for go_back in before:
                go_back()
            raise
        for load in loads:
            load()

    def _num_steps(self, state_dict: Mapping[str, torch.Tensor]) -> int:
        found = state_dict.get(checkpoint.NUM_STEPS)
        if found is None and self._is_scheduled:
            raise CheckpointMismatchError(
                f"the saved state has no {checkpoint.NUM_STEPS!r}, which says where the schedule is; load what state(...)"
                f".state_dict() returned, or compile without a schedule and call use_rules"
            )
        return 0 if found is None else int(found)

    def _check_part(self, part: Part, held: Mapping[str, torch.Tensor], recorded: bool) -> Callable[[], None]:
        # Of several parts, each has a step to end only if it recorded an amax; ranks that reduce end their steps together.
        if len(self._parts) > 1 and not part.session.reduction.is_active:
            recorded = recorded and any(checkpoint.has_staged(key, value) for key, value in held.items())
        try:
            return _checked(part.session, held, recorded)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{part.prefix}: {error}" if part.prefix else str(error)) from error

    def _check_not_empty(self, state_dict: Mapping[str, torch.Tensor], num_entries: int) -> None:
        if num_entries or not self._is_stateful:
            return
        if checkpoint.NUM_TENSORS not in state_dict:
            raise CheckpointMismatchError(
                "the state_dict is empty, and this model has a recipe with state: its scales would begin anew. Load what"
                " state(...).state_dict() returned; to begin with empty histories, do not call load_state_dict"
            )
        if num_saved := int(state_dict[checkpoint.NUM_TENSORS]):
            raise CheckpointMismatchError(
                f"the checkpoint holds {num_saved} tensors and none of them was read: torch.distributed.checkpoint reads"
                f" what state_dict() names, and before its first call this model has no tensors. Use"
                f" state(compiled).load_checkpoint(checkpoint_id), or load after a forward and a backward"
            )

    def _split(self, entries: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The entries of each part, by their names in it."""
        split: list[dict[str, torch.Tensor]] = [{} for _ in self._parts]
        foreign = []
        for key, value in entries.items():
            found = part_of(self._parts, checkpoint.parse_key(key).name.module)
            if found is None:
                foreign.append(key)
            else:
                part, inner = found
                split[self._parts.index(part)][f"{inner}:{key.rpartition(':')[2]}"] = value
        if foreign:
            raise CheckpointMismatchError(
                f"the saved state does not fit this model: no compiled part of it has {preview(foreign)}. Compile the parts"
                f" that were compiled when it was saved ({preview([part.prefix for part in self._parts])} are)"
            )
        return split

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

    @property
    def _sessions(self) -> list[Session]:
        return [part.session for part in self._parts]

    @property
    def _is_stateful(self) -> bool:
        return any(session.stores.recipes for session in self._sessions)

    @property
    def _is_scheduled(self) -> bool:
        return any(session.options.later_rules for session in self._sessions)

    def _find(self, name: str) -> tuple[DelayedStore, Any]:
        """The store that holds a tensor, and where in it."""
        module, colon, _ = name.rpartition(":")
        found = part_of(self._parts, module) if colon else None
        if found is not None:
            part, inner = found
            text = f"{inner}{name[len(module) :]}"
            store = _store_of(part.session, text)
            if store is not None:
                return store, store.where(text)
        may_come = self._is_stateful and not any(session.graphs for session in self._sessions)
        missing = "none yet: run a forward first" if may_come else "none: only tensors under delayed scaling have a state"
        hint = nearest(name, self.tensors) or f" There are {preview(self.tensors) or missing}."
        raise UnknownTensorError(f"no tensor is called {name!r}.{hint}")


def _renamed(text: str, rename: Callable[[str], str]) -> str:
    """The name of a tensor, or the key of an entry, with another path of its module."""
    module, _, rest = text.rpartition(":")
    return f"{rename(module)}:{rest}"


def _stores(session: Session) -> list[DelayedStore]:
    """The stores that hold tensors."""
    return [store for store in session.stores if len(store)]


def _names(session: Session) -> list[str]:
    """Names of the tensors, in the order in which graphs first quantized them."""
    return list(dict.fromkeys(name for store in _stores(session) for name in store.names))


def _store_of(session: Session, name: str) -> DelayedStore | None:
    """The store that holds a tensor, whatever name of it is given."""
    return next((store for store in _stores(session) if name in store), None)


def _saved(session: Session) -> dict[str, torch.Tensor]:
    saved: dict[str, torch.Tensor] = {}
    for store in _stores(session):
        rank, is_shared = 0, True
        if is_distributed(None):
            rank, group = dist.get_rank(), session.reduction.group
            is_shared = store.recipe.reduce_amax and (group is None or dist.get_world_size(group) == dist.get_world_size())
        saved.update(checkpoint.save_store(store, rank, is_shared=is_shared, reduces=session.reduction.is_active))
    return saved


def _checked(session: Session, state_dict: Mapping[str, torch.Tensor], recorded: bool) -> Callable[[], None]:
    """Check the entries of a session's tensors, by their names in its own model; the returned function loads them.

    recorded: whether amaxes were recorded since the last step boundary when the state was saved. Raises
    CheckpointMismatchError if the entries do not fit.
    """
    saved = checkpoint.read_entries(state_dict, dist.get_rank() if is_distributed(None) else 0)
    names, own = checkpoint.names_in(saved), _names(session)
    if not names and not own:
        return lambda: session.clock.set_pending(recorded and bool(session.options.later_rules))
    if not session.stores.recipes:
        raise CheckpointMismatchError(
            f"the saved state holds {len(names)} tensors of delayed scaling; this model's recipe keeps no state"
        )
    placed: dict[DelayedStore, list[str]] = {}
    for name in names:  # the rules tell the store where no graph has claimed the tensor
        store = _store_of(session, name) or session.stores.expected_store(TensorName.parse(name))
        placed.setdefault(store, []).append(name)
    restored = set[str]().union(*(store.restored for store in _stores(session)))
    if set(own) - restored:
        checkpoint.check_names(names, own)
    elif (root := session.root()) is not None:
        modules = module_paths(root)
        if foreign := [n for n in names if TensorName.parse(n).module not in modules]:
            raise CheckpointMismatchError(
                f"the saved state does not fit this model: it has no modules for {preview(foreign)}."
                f" The state was left as it was"
            )
    for store, held in placed.items():
        checkpoint.check_entries(store, saved, held)

    def load() -> None:
        for store, held in placed.items():
            checkpoint.load_store(store, saved, held)
        session.clock.set_pending(recorded)

    return load
