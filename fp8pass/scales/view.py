"""`state(compiled)`: the user's view of the state of delayed scaling, and its checkpoints.

A checkpoint has plain tensors, for torch.save (weights_only), safetensors and torch.distributed.checkpoint.

NOTE [entries of a rank] torch.distributed.checkpoint keeps one copy of an entry that several ranks have. So what is
a rank's own has its rank in the key, as in "wq:input.staged@1": the amaxes of a step that has not ended, and
everything where amaxes are not reduced over all ranks.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from fp8pass.errors import CheckpointMismatchError, UnknownTensorError, nearest, preview
from fp8pass.graph.origin import TensorName
from fp8pass.graph.values import by_key
from fp8pass.runtime.instances import module_paths, without_wrappers, wrapper_paths
from fp8pass.runtime.ranks import rule_words
from fp8pass.runtime.session import Part, Session, end_steps, part_of
from fp8pass.scales.reduction import is_distributed
from fp8pass.scales.store import DelayedStore
from fp8pass.scales.stores import missing_of
from lowering.formats import fp8_max

Held = Literal["amax_history", "scale", "fp8_max", "num_non_finite"]  # Parts of a tensor's state, as the store calls them.
EntryPart = Literal[Held, "staged"]  # The content of an entry; "staged" is the amax of a step that has not ended, of one rank.

HELD: tuple[Held, ...] = get_args(Held)
PARTS: tuple[EntryPart, ...] = (*HELD, "staged")

#: Entries that belong to no tensor. The key of a tensor's entry has a colon: it is none of these.
RECORDED = "recorded"
NUM_TENSORS = "num_tensors"
NUM_STEPS = "num_steps"
MODEL = "model"  # A digest of the model's modules and the rules in force.
OF_NO_TENSOR = (RECORDED, NUM_TENSORS, NUM_STEPS, MODEL)

_ENTRY = re.compile(rf"(?P<name>.+)\.(?P<part>{'|'.join(PARTS)})(?:@(?P<rank>\d+))?", re.DOTALL)


def key_of(name: TensorName, part: EntryPart, rank: int | None = None) -> str:
    """The key of one tensor in a saved state: "layers.0.attn.wq:input.scale". rank: the one
    that has it, as in "wq:input.staged@1"; None where all ranks have the same."""
    return f"{name}.{part}" + ("" if rank is None else f"@{rank}")


def parse_key(key: str) -> tuple[TensorName, EntryPart, int | None]:
    """The name, the part and the rank of which `key_of` made a key; raises CheckpointMismatchError for any other text."""
    try:
        match = _ENTRY.fullmatch(key)
        if match is None:
            raise ValueError(f"{key!r} is not the key of a tensor's state; one looks like 'wq:input.scale'")
        part = next(p for p in PARTS if p == match["part"])
        return TensorName.parse(match["name"]), part, None if match["rank"] is None else int(match["rank"])
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{key!r} is not an entry of an fp8pass state; load the result of `state(...).state_dict()`"
        ) from error


Saved = dict[str, dict[EntryPart, torch.Tensor]]  # The parts of each tensor, by its name.


class Fp8State:
    """Scales and amax histories of every tensor quantized with delayed scaling; a `torch.distributed.checkpoint` Stateful.

    Names are `<module path>:<input|weight|grad_output>`, the same in every process. A tensor that several GEMMs share is
    named after the first one; the names after the other ones are accepted too. Where modules of a model were compiled one by
    one, it is the state of all of them, by their paths in the model.
    """

    def __init__(self, parts: Sequence[Part]):
        self._of = tuple(parts)

    @property
    def _parts(self) -> tuple[Part, ...]:
        """The compiled parts, whose names are those that their modules have in the model now."""
        for part in self._of:
            part.session.follow_modules()
        return self._of

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
        store.merge_outgrown()
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
        due = [session for session in self._sessions if session.clock.is_step_pending or session.reduction.is_active]
        end_steps(due)

    def refresh_weights(self) -> None:
        """Quantize all weights again before they are next used, whose FP8 copies are kept between calls (`weight_copies`).

        Needed only with `weight_copies="cache"`, after a write that torch does not count: through `.data`, by a fused operation
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
        """Restore Parameters that `release_frozen=True` has released from their FP8 copies, rounded to their dtype.

        The next call of the compiled model releases those again that are still frozen. The copies do not change.
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
            saved[NUM_STEPS] = torch.tensor(max(session.num_steps for session in self._sessions))
            saved[RECORDED] = torch.tensor(any(session.clock.is_step_pending for session in self._sessions))
        if self._is_stateful:
            saved[NUM_TENSORS] = torch.tensor(len(self.tensors))
            if (digest := self._digest()) is not None:
                saved[MODEL] = torch.tensor(digest)
        return saved

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state, before or after the first call of the compiled model.

        Raises CheckpointMismatchError, and changes nothing, if it does not fit: other tensors, another history length or
        another format, or nothing at all under a recipe with state. Before the first call the model's tensors are not known
        yet; then module paths are checked now and tensors when the first graph is bound. A module that was frozen when the
        state was saved has no gradients in it: their histories begin empty.
        """
        entries = {key: value for key, value in state_dict.items() if key not in OF_NO_TENSOR}
        self._check_not_empty(state_dict, len(entries))
        found = state_dict.get(NUM_STEPS)
        if found is None and self._is_scheduled:
            raise CheckpointMismatchError(
                f"the saved state has no {NUM_STEPS!r}, the position in the schedule; load the result of"
                f" state(...).state_dict(), or compile without a schedule and call use_rules"
            )
        num_steps = 0 if found is None else int(found)
        split = self._split(entries)
        recorded = bool(state_dict.get(RECORDED, True))
        before = [session.go_to(num_steps) for session in self._sessions]
        try:
            may_differ = self._is_whole(state_dict)
            loads = [self._check_part(part, held, recorded, may_differ) for part, held in zip(self._parts, split, strict=True)]
        except CheckpointMismatchError:
            for go_back in before:
                go_back()
            raise
        for load in loads:
            load()

    def _is_whole(self, state_dict: Mapping[str, torch.Tensor]) -> bool:
        """True if this model saved the state under the rules in force, with all tensors that it had then."""
        if state_dict.get(MODEL) is None or int(state_dict[MODEL]) != self._digest():
            return False
        names = {str(parse_key(key)[0]) for key in state_dict if key not in OF_NO_TENSOR}
        return len(names) == int(state_dict.get(NUM_TENSORS, -1))

    def _digest(self) -> int | None:
        """A number for the paths of the modules in each part, and its rules, that is the same in every process. None for a
        function or a graph that others own: it has no modules, and another with its rules is not known from it."""
        if any(part.session.root() is None for part in self._parts):
            return None
        parts = [(part.prefix, _paths(part.session), *map(repr, _words_of_rules(part.session))) for part in self._parts]
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")

    def _check_part(self, part: Part, held: Mapping[str, torch.Tensor], recorded: bool, may_differ: bool) -> Callable[[], None]:
        # Of several parts, each has a step to end only if it recorded an amax; ranks that reduce end their steps together.
        if len(self._parts) > 1 and not part.session.reduction.is_active:
            recorded = recorded and any(has_staged(key, value) for key, value in held.items())
        try:
            return _checked(part.session, held, recorded, may_differ)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{part.prefix}: {error}" if part.prefix else str(error)) from error

    def _check_not_empty(self, state_dict: Mapping[str, torch.Tensor], num_entries: int) -> None:
        if num_entries or not self._is_stateful:
            return
        if NUM_TENSORS not in state_dict:
            raise CheckpointMismatchError(
                "the state_dict is empty, and this model has a recipe with state: its scales would start from scratch. Load the"
                " result of state(...).state_dict(); to begin with empty histories, do not call load_state_dict"
            )
        if num_saved := int(state_dict[NUM_TENSORS]):
            raise CheckpointMismatchError(
                f"the checkpoint holds {num_saved} tensors and none of them was read: torch.distributed.checkpoint reads"
                f" the names in state_dict(), and before its first call this model has none. Use"
                f" state(compiled).load_checkpoint(checkpoint_id), or load after a forward and a backward"
            )

    def _split(self, entries: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The entries of each part, by their names in it."""
        split: list[dict[str, torch.Tensor]] = [{} for _ in self._parts]
        foreign = []
        for key, value in entries.items():
            found = part_of(self._parts, parse_key(key)[0].module)
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
        """Load the state from a checkpoint of `torch.distributed.checkpoint.save({key: state(compiled), ...})`, on any
        number of ranks.

        For a model that has not run yet: `torch.distributed.checkpoint.load` reads only the tensors that a model names, and
        it has none. Every rank reads without communication. Raises CheckpointMismatchError as
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
        if saved:
            with warnings.catch_warnings():
                # Reading alone is intended here, whether or not there is a process group.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load({key: saved}, storage_reader=reader, no_dist=True)
        elif self._is_stateful:
            raise CheckpointMismatchError(f"{checkpoint_id} has no entries under {key!r}; pass the key that it was saved under")
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


def _paths(session: Session) -> list[str]:
    """The paths of a model's modules and, once more, those of its Parameters without repetition; none for a function."""
    root = session.root()
    if root is None:
        return []
    wrapped = wrapper_paths(root)
    return sorted([*module_paths(root), *(without_wrappers(name, wrapped) for name, _ in root.named_parameters())])


def _words_of_rules(session: Session) -> list[Any]:
    """The rules in force, and those that the model was compiled with: names of tensors under several recipes follow these."""
    return [rule_words(rules) for rules in (session.rules, session.options.first_rules)]


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
        saved.update(save_store(store, rank, is_shared=is_shared, reduces=session.reduction.is_active))
    return saved


def _checked(session: Session, state_dict: Mapping[str, torch.Tensor], recorded: bool, may_differ: bool) -> Callable[[], None]:
    """Check the entries of a session's tensors, by their names in its own model; the returned function loads them. recorded:
    whether amaxes were recorded since the last step boundary when the state was saved. may_differ: whether the tensors may be
    others than those that the model has had so far. Raises CheckpointMismatchError if the entries do not fit."""
    saved = read_entries(state_dict, dist.get_rank() if is_distributed(None) else 0)
    names, own = list(saved), _names(session)
    if not names and not own:
        return lambda: session.clock.set_pending(recorded and bool(session.options.later_rules))
    if not session.stores.recipes:
        raise CheckpointMismatchError(
            f"the saved state holds {len(names)} tensors of delayed scaling; this model's recipe keeps no state"
        )
    # The rules tell the store where no graph has claimed the tensor.
    placed = by_key(names, lambda n: _store_of(session, n) or session.stores.expected_store(TensorName.parse(n)))
    restored = set[str]().union(*(store.restored for store in _stores(session)))
    if (known := set(own) - restored) and not may_differ:
        has_trained = any(graph.trains for graph in session.every_graph)  # else no gradient has a name yet
        check_names(names if has_trained else known.intersection(names), own if has_trained else known)
    if (root := session.root()) is not None:
        modules = module_paths(root)
        if foreign := [n for n in names if TensorName.parse(n).module not in modules]:
            raise CheckpointMismatchError(
                f"the saved state does not fit this model: it has no modules for {preview(foreign)}."
                f" The state was left as it was"
            )
    for store, held in placed.items():
        check_entries(store, saved, held)

    def load() -> None:
        for store, held in placed.items():
            load_store(store, saved, held, is_complete=not may_differ)
        for store in _stores(session):
            store.forget([name for name in store.names if name not in saved and name not in store.aliases])
        session.clock.set_pending(recorded)

    return load


# -- entries of a store


def save_store(store: DelayedStore, rank: int = 0, *, is_shared: bool = True, reduces: bool = False) -> dict[str, torch.Tensor]:
    """`{"layers.0.attn.wq:input.scale": ..., ...}`: copies, none shares memory with another. A tensor's amax history is [len],
    the other parts are scalars; those of n batched weights [len, n] and [n]. is_shared: whether all ranks have equal histories
    and scales. reduces: whether the staged amaxes of this rank are only a part of the step's."""
    saved: dict[str, torch.Tensor] = {}
    store.merge_outgrown()
    for text in store.names:
        name, where = TensorName.parse(text), store.where(text)
        parts = {part: getattr(store, part)[..., where].clone() for part in HELD}
        saved |= {key_of(name, part, None if is_shared else rank): value for part, value in parts.items()}
        if is_shared and reduces:
            history = parts["amax_history"]
            saved[key_of(name, "staged", rank)] = history[0].clone()
            history[0] = 0
    return saved


def read_entries(state_dict: Mapping[str, torch.Tensor], rank: int) -> Saved:
    """The entries that concern a rank. Staged amaxes of several ranks become their largest, which the step's reduction would
    make of them. Raises CheckpointMismatchError for foreign keys, for a tensor that lacks an entry, and if other ranks' state
    is there, but not this one's."""
    saved: Saved = {}
    staged: dict[str, torch.Tensor] = {}
    others: list[tuple[str, EntryPart]] = []
    for key, value in state_dict.items():
        if key in OF_NO_TENSOR:
            continue
        tensor, part, of_rank = parse_key(key)
        name = str(tensor)
        if part == "staged":
            staged[name] = torch.maximum(staged[name], value) if name in staged else value
        elif of_rank in (None, rank):
            saved.setdefault(name, {})[part] = value
        else:
            others.append((name, part))
    missing = sorted({f"{name}.{part}" for name, part in others if part not in saved.get(name, {})})
    if missing:
        raise CheckpointMismatchError(
            f"each rank saved a state of its own, and the checkpoint has none for rank {rank} ({preview(missing, 2)}):"
            f" amaxes were not reduced over all ranks. Resume on the same number of ranks"
        )
    for name, parts in saved.items():
        lacking = sorted(set(HELD) - set(parts))
        if lacking:
            raise CheckpointMismatchError(f"the saved state of '{name}' lacks {', '.join(lacking)}")
        if name in staged:
            history = parts["amax_history"] = parts["amax_history"].clone()
            history[0] = torch.maximum(history[0], staged[name].to(history.device))
    return saved


def has_staged(key: str, value: torch.Tensor) -> bool:
    """Tell whether an entry holds an amax of a step that has not ended."""
    _, part, _ = parse_key(key)
    staged = value[0] if part == "amax_history" else value
    return part in ("amax_history", "staged") and bool((staged != 0).any())


def check_entries(store: DelayedStore, saved: Saved, names: Iterable[str]) -> None:
    """Raise CheckpointMismatchError unless every entry has the shape and format that `store` expects. Changes nothing."""
    length, formats = store.recipe.amax_history_len, store.recipe.fp8_format
    for name in names:
        if name in store:
            count = store.entries(name)
            shape: tuple[int, ...] = () if count == 1 else (count,)
            possible = [float(store.fp8_max[store.column(name)])]
        else:  # No graph has claimed it. Its name does not tell the format: it is of the first GEMM, maybe in high precision.
            scale = saved[name]["scale"]
            shape = tuple(scale.shape) if isinstance(scale, torch.Tensor) and scale.dim() == 1 else ()
            possible = sorted({fp8_max(dtype) for dtype in (formats.forward, formats.backward)})
        for part in HELD:
            value = saved[name][part]
            expected = (length, *shape) if part == "amax_history" else shape
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected:
                got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CheckpointMismatchError(
                    f"{name}.{part} has shape {got} in the saved state and {expected} with this recipe; use the"
                    f" amax_history_len of the recipe that it was saved with"
                )
        limit = _fp8_max(saved, name)
        if limit not in possible:
            here = " or ".join(f"{p:g}" for p in possible)
            raise CheckpointMismatchError(
                f"{name} was saved with fp8_max {limit:g} and has {here} with this recipe; use the same fp8_format"
            )


def check_names(saved: Collection[str], current: Collection[str]) -> None:
    """Raise CheckpointMismatchError with the names that differ, if any do: see `missing_of`."""
    missing = sorted(missing_of(set(current) - set(saved), saved))
    unexpected = sorted(set(saved) - set(current))
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"the saved state does not fit this model and recipe: missing from the checkpoint: {preview(missing) or 'none'};"
            f" unknown to the model: {preview(unexpected) or 'none'}. The state was left as it was"
        )


def load_store(store: DelayedStore, saved: Saved, names: Iterable[str], *, is_complete: bool = True) -> None:
    """Copy checked entries into the store; tensors that no graph has claimed yet get a column now. is_complete: whether other
    tensors of modules that the state does not have are an error."""
    names = list(names)
    unclaimed = [n for n in names if n not in store]
    counts = [saved[n]["scale"].numel() for n in names]
    store.add(names, [_fp8_max(saved, n) for n in names], counts)
    store.restored.update(unclaimed)
    store.is_complete = is_complete
    store.merge_outgrown()  # so that nothing of the step that is given up remains there
    for name in names:
        where = store.where(name)
        for part in HELD:
            getattr(store, part)[..., where] = saved[name][part].to(store.device)
    store.note_empty(names)
    # An amax of a step that has not ended may be the first of its history, which the boundary finds out.
    store.started.update(name for name in names if name in store.empty)
    store.version += 1


def _fp8_max(saved: Saved, name: str) -> float:
    return float(saved[name]["fp8_max"].flatten()[0])
