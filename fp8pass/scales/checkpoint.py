"""The state as plain tensors, for torch.save (weights_only), safetensors and torch.distributed.checkpoint, and back.

NOTE [entries of a rank] torch.distributed.checkpoint keeps one copy of an entry that several ranks have. So what is
a rank's own has its rank in the key, as in "wq:input.staged@1": the amaxes of a step that has not ended, and
everything where amaxes are not reduced over all ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

import torch

from fp8pass.errors import CheckpointMismatchError, preview
from fp8pass.graph.names import TensorName
from fp8pass.scales.store import DelayedStore
from lowering.formats import fp8_max

Held = Literal["amax_history", "scale", "fp8_max", "num_non_finite"]
"""Parts of a tensor's state, as the store calls its buffers."""
Part = Literal[Held, "staged"]
"""The content of an entry; "staged" is the amax of a step that has not ended, of one rank."""

HELD: tuple[Held, ...] = get_args(Held)
PARTS: tuple[Part, ...] = (*HELD, "staged")

#: Entries that belong to no tensor. The key of a tensor's entry has a colon: it is none of these.
RECORDED = "recorded"
NUM_TENSORS = "num_tensors"
NUM_STEPS = "num_steps"
OF_NO_TENSOR = (RECORDED, NUM_TENSORS, NUM_STEPS)

_ENTRY = re.compile(rf"(?P<name>.+)\.(?P<part>{'|'.join(PARTS)})(?:@(?P<rank>\d+))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The key of one tensor in a saved state: "layers.0.attn.wq:input.scale", or with a rank "wq:input.staged@1"."""

    name: TensorName
    part: Part
    rank: int | None = None
    """The rank that has it; None where all ranks have the same."""

    def __str__(self) -> str:
        return f"{self.name}.{self.part}" + ("" if self.rank is None else f"@{self.rank}")

    @classmethod
    def parse(cls, text: str) -> Entry:
        """The entry that `str` wrote; raises ValueError for any other text."""
        match = _ENTRY.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not the key of a tensor's state; one looks like 'wq:input.scale'")
        part = next(p for p in PARTS if p == match["part"])
        return cls(TensorName.parse(match["name"]), part, None if match["rank"] is None else int(match["rank"]))


Saved = dict[Entry, torch.Tensor]


def save_store(store: DelayedStore, rank: int = 0, *, is_shared: bool = True, reduces: bool = False) -> dict[str, torch.Tensor]:
    """`{"layers.0.attn.wq:input.scale": ..., ...}`: copies, none shares memory with another.

    A tensor's amax history is [len], the other parts are scalars; those of n batched weights [len, n] and [n]. is_shared:
    whether all ranks have equal histories and scales. reduces: whether the staged amaxes of this rank are only a part of the
    step's.
    """
    saved: Saved = {}
    owner = None if is_shared else rank
    for text in store.names:
        name, where = TensorName.parse(text), store.where(text)
        for part in HELD:
            saved[Entry(name, part, owner)] = getattr(store, part)[..., where].clone()
        if is_shared and reduces:
            history = saved[Entry(name, "amax_history")]
            saved[Entry(name, "staged", rank)] = history[0].clone()
            history[0] = 0
    return {str(entry): value for entry, value in saved.items()}


def read_entries(state_dict: Mapping[str, torch.Tensor], rank: int) -> Saved:
    """The entries that concern a rank, without ranks.

    Staged amaxes of several ranks become their largest, which the step's reduction would make of them. Raises
    CheckpointMismatchError for foreign keys, for a tensor that lacks an entry, and if other ranks' state is there, but not
    this one's.
    """
    saved: Saved = {}
    staged: dict[TensorName, torch.Tensor] = {}
    others: dict[Entry, None] = {}
    for key, value in state_dict.items():
        if key in OF_NO_TENSOR:
            continue
        entry = parse_key(key)
        plain = dataclasses.replace(entry, rank=None)
        if entry.part == "staged":
            staged[entry.name] = torch.maximum(staged[entry.name], value) if entry.name in staged else value
        elif entry.rank in (None, rank):
            saved[plain] = value
        else:
            others[plain] = None
    missing = [str(entry) for entry in others if entry not in saved]
    if missing:
        raise CheckpointMismatchError(
            f"each rank saved a state of its own, and the checkpoint has none for rank {rank} ({preview(sorted(missing), 2)}):"
            f" amaxes were not reduced over all ranks. Resume on the same number of ranks"
        )
    for name in dict.fromkeys(entry.name for entry in saved):
        lacking = sorted(part for part in HELD if Entry(name, part) not in saved)
        if lacking:
            raise CheckpointMismatchError(f"the saved state of '{name}' lacks {', '.join(lacking)}")
    for name, amax in staged.items():
        entry = Entry(name, "amax_history")
        if entry in saved:
            history = saved[entry] = saved[entry].clone()
            history[0] = torch.maximum(history[0], amax.to(history.device))
    return saved


def has_staged(key: str, value: torch.Tensor) -> bool:
    """Tell whether an entry holds an amax of a step that has not ended."""
    part = parse_key(key).part
    staged = value[0] if part == "amax_history" else value
    return part in ("amax_history", "staged") and bool((staged != 0).any())


def parse_key(key: str) -> Entry:
    """The entry with this key; raises CheckpointMismatchError if no state has such a key."""
    try:
        return Entry.parse(key)
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{key!r} is not an entry of an fp8pass state; load what `state(...).state_dict()` returned"
        ) from error


def names_in(saved: Saved) -> list[str]:
    """The tensors that a saved state describes, in their saved order."""
    return list(dict.fromkeys(str(entry.name) for entry in saved))


def check_entries(store: DelayedStore, saved: Saved, names: Iterable[str]) -> None:
    """Raise CheckpointMismatchError unless every entry has the shape and format that `store` expects. Changes nothing."""
    length = store.recipe.amax_history_len
    for name in names:
        shape = _shape_of(store, saved, name)
        for part in HELD:
            value = saved[Entry(TensorName.parse(name), part)]
            expected = (length, *shape) if part == "amax_history" else shape
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected:
                got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CheckpointMismatchError(
                    f"{name}.{part} has shape {got} in the saved state and {expected} with this recipe; use the"
                    f" amax_history_len of the recipe that it was saved with"
                )
        limit, possible = _fp8_max(saved, name), _possible_fp8_max(store, name)
        if limit not in possible:
            here = " or ".join(f"{p:g}" for p in possible)
            raise CheckpointMismatchError(
                f"{name} was saved with fp8_max {limit:g} and has {here} with this recipe; use the same fp8_format"
            )


def _possible_fp8_max(store: DelayedStore, name: str) -> list[float]:
    """The largest FP8 value of a tensor: as the store has it, or those of the recipe where no graph has claimed it yet.

    A name alone does not tell the format: its kind is that of the first GEMM that reads the tensor, maybe in high precision.
    """
    if name in store:
        return [float(store.fp8_max[store.column(name)])]
    return sorted({fp8_max(dtype) for dtype in (store.recipe.fp8_format.forward, store.recipe.fp8_format.backward)})


def _shape_of(store: DelayedStore, saved: Saved, name: str) -> tuple[int, ...]:
    """The shape of a tensor's scale: as the store has it, or as it was saved where no graph has claimed it yet."""
    if name in store:
        count = store.entries(name)
        return () if count == 1 else (count,)
    scale = saved[Entry(TensorName.parse(name), "scale")]
    return tuple(scale.shape) if isinstance(scale, torch.Tensor) and scale.dim() == 1 else ()


def check_names(saved: Collection[str], current: Collection[str]) -> None:
    """Raise CheckpointMismatchError with the names that differ, if any do."""
    missing, unexpected = sorted(set(current) - set(saved)), sorted(set(saved) - set(current))
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"the saved state does not fit this model and recipe: missing from the checkpoint: {preview(missing) or 'none'};"
            f" unknown to the model: {preview(unexpected) or 'none'}. The state was left as it was"
        )


def load_store(store: DelayedStore, saved: Saved, names: Iterable[str]) -> None:
    """Copy checked entries into the store; tensors that no graph has claimed yet get a column now."""
    names = list(names)
    unclaimed = [n for n in names if n not in store]
    counts = [saved[Entry(TensorName.parse(n), "scale")].numel() for n in names]
    store.add(names, [_fp8_max(saved, n) for n in names], counts)
    store.restored.update(unclaimed)
    store.is_complete = True
    for name in names:
        where = store.where(name)
        for part in HELD:
            getattr(store, part)[..., where] = saved[Entry(TensorName.parse(name), part)].to(store.device)
    store.note_empty(names)
    store.version += 1


def _fp8_max(saved: Saved, name: str) -> float:
    return float(saved[Entry(TensorName.parse(name), "fp8_max")].flatten()[0])
