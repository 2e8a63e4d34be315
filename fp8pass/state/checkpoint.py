"""The state as plain tensors, for torch.save (weights_only), safetensors and torch.distributed.checkpoint, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch

from fp8pass.errors import CheckpointMismatchError, preview
from fp8pass.state.store import DelayedStore

#: Parts of a tensor's state: key suffix -> how the store holds it.
_PARTS = ("amax_history", "scale", "fp8_max", "num_non_finite")
RECORDED = "recorded"


NUM_TENSORS = "num_tensors"
_STAGED = "staged"


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Whose state is saved.

    NOTE [entries of a rank] torch.distributed.checkpoint keeps one copy of an entry that several ranks have. So what is
    a rank's own has its rank in the key, as in "wq:input.staged@1": the amaxes of a step that has not ended, and
    everything where amaxes are not reduced over all ranks.
    """

    rank: int = 0
    is_shared: bool = True
    """Whether all ranks have equal histories and scales."""
    reduces: bool = False
    """Whether the staged amaxes of this rank are only a part of the step's."""


def save_store(store: DelayedStore, ranks: Ranks) -> dict[str, torch.Tensor]:
    """`{"layers.0.attn.wq:input.scale": ..., ...}`: copies, none shares memory with another."""
    saved = {}
    owner = "" if ranks.is_shared else f"@{ranks.rank}"
    for name in store.names:
        column = store.column(name)
        for part in _PARTS:
            saved[f"{name}.{part}{owner}"] = getattr(store, part)[..., column].clone()
        if ranks.is_shared and ranks.reduces:
            history = saved[f"{name}.amax_history"]
            saved[f"{name}.{_STAGED}@{ranks.rank}"] = history[0].clone()
            history[0] = 0
    return saved


def entries_of(saved: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """The entries that concern a rank, under keys without ranks.

    Staged amaxes of several ranks become their largest, which the step's reduction would make of them. Raises
    CheckpointMismatchError if other ranks' state is there, but not this one's.
    """
    entries: dict[str, torch.Tensor] = {}
    staged: dict[str, torch.Tensor] = {}
    others: set[str] = set()
    for key, entry in saved.items():
        plain, _, owner = key.partition("@")
        name, _, part = plain.rpartition(".")
        if part == _STAGED:
            staged[name] = torch.maximum(staged[name], entry) if name in staged else entry
        elif not owner or owner == str(rank):
            entries[plain] = entry
        else:
            others.add(plain)
    missing = sorted(others - set(entries))
    if missing:
        raise CheckpointMismatchError(
            f"each rank's state was saved for itself, and there is none of rank {rank} ({preview(missing, 2)}): amaxes were"
            f" not reduced over all ranks. Resume on as many ranks as before"
        )
    for name, amax in staged.items():
        history = entries.get(f"{name}.amax_history")
        if history is not None:
            history = history.clone()
            history[0] = torch.maximum(history[0], amax.to(history.device))
            entries[f"{name}.amax_history"] = history
    return entries


def names_in(saved: Mapping[str, torch.Tensor]) -> list[str]:
    """The tensors that a saved state describes, in their saved order; raises CheckpointMismatchError for foreign keys."""
    names: dict[str, set[str]] = {}
    for key in saved:
        if key in (RECORDED, NUM_TENSORS):
            continue
        name, _, part = key.rpartition(".")
        if part not in _PARTS or ":" not in name:
            raise CheckpointMismatchError(f"{key!r} is no entry of an fp8pass state; load what `state(...).state_dict()` gave")
        names.setdefault(name, set()).add(part)
    for name, parts in names.items():
        if parts != set(_PARTS):
            raise CheckpointMismatchError(f"{name!r} lacks {', '.join(sorted(set(_PARTS) - parts))} in the saved state")
    return list(names)


def check_entries(store: DelayedStore, saved: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Raise CheckpointMismatchError unless every entry has the shape and format that `store` expects. Changes nothing."""
    length = store.recipe.amax_history_len
    for name in names:
        for part in _PARTS:
            entry = saved[f"{name}.{part}"]
            expected = (length,) if part == "amax_history" else ()
            if not isinstance(entry, torch.Tensor) or tuple(entry.shape) != expected:
                got = tuple(entry.shape) if isinstance(entry, torch.Tensor) else type(entry).__name__
                raise CheckpointMismatchError(
                    f"{name}.{part} has shape {got} in the saved state and {expected} under this recipe; use the"
                    f" amax_history_len of the recipe that it was saved with"
                )
        if name in store:
            limit, current = float(saved[f"{name}.fp8_max"]), float(store.fp8_max[store.column(name)])
            if limit != current:
                raise CheckpointMismatchError(
                    f"{name} was saved with fp8_max {limit:g} and has {current:g} under this recipe; use the same fp8_format"
                )


def check_names(saved: Collection[str], current: Collection[str]) -> None:
    """Raise CheckpointMismatchError with the names that differ, if any do."""
    missing, unexpected = sorted(set(current) - set(saved)), sorted(set(saved) - set(current))
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"the saved state does not fit this model and recipe: missing in the checkpoint: {preview(missing) or 'none'};"
            f" unknown to the model: {preview(unexpected) or 'none'}. The state was left as it was"
        )


def load_store(store: DelayedStore, saved: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Copy checked entries into the store; tensors that no graph has claimed yet get a column now."""
    names = list(names)
    unclaimed = [n for n in names if n not in store]
    store.add(names, [float(saved[f"{n}.fp8_max"]) for n in names])
    store.restored.update(unclaimed)
    for name in names:
        column = store.column(name)
        for part in _PARTS:
            getattr(store, part)[..., column] = saved[f"{name}.{part}"].to(store.device)
    store.version += 1
