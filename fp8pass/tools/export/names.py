"""Names of tensors on disk. For some models of transformers they are not those in memory: it keeps the experts of a layer in
one Parameter, and writes a matrix of each expert, gate and up apart.

`transformers.core_model_loading.revert_weight_conversion` is what `save_pretrained` calls. Here it converts markers, which
number the rows of weights, so that FP8 values and scales can be cut as the weights are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fp8pass.runtime.instances import without_wrappers, wrapper_paths


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a weight, under one name on disk."""

    name: str
    matrix: int | None
    """Of a batch [E, N, K]: which of its matrices; None for a matrix, and for the whole of a batch."""
    rows: slice


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def unwrapped_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, by all of their names without the parts that wrappers add."""
    wrapped = wrapper_paths(model)
    return [(without_wrappers(name, wrapped), module) for name, module in model.named_modules(remove_duplicate=False)]


def output_embedding(model: nn.Module) -> str | None:
    """The name of the module that makes the logits of a model of transformers, None where there is none."""
    if not is_pretrained(model):
        return None
    pretrained: Any = model
    head = pretrained.get_output_embeddings()
    return next((name for name, module in unwrapped_modules(model) if module is head), None)


def to_disk(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as `save_pretrained` writes them, by their names there."""
    if not is_pretrained(model) or not tensors:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


def pieces_of(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, list[Piece] | str]:
    """Where the rows of weights, matrices [N, K] or batches [E, N, K], are on disk, or why that cannot be said."""
    starts: dict[str, int] = {}
    markers: dict[str, torch.Tensor] = {}
    end = 0
    for name, weight in weights.items():
        starts[name], count = end, weight.shape[:-1].numel()
        markers[name] = torch.arange(end, end + count).reshape(*weight.shape[:-1], 1)
        end += count
    try:
        converted = to_disk(model, markers)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:  # a conversion that needs all columns
        if len(weights) == 1:
            return dict.fromkeys(weights, f"names: its conversion to disk is not one of rows ({error})")
        return {k: v for name, weight in weights.items() for k, v in pieces_of(model, {name: weight}).items()}
    found: dict[str, list[Piece] | str] = {name: [] for name in weights}
    for disk_name, rows in converted.items():
        first = int(rows.flatten()[0])
        name = max((n for n in starts if starts[n] <= first), key=lambda n: starts[n])
        piece = _piece(disk_name, rows, starts[name], weights[name])
        held = found[name]
        if piece is None:
            found[name] = f"names: on disk its rows are in another order, or with those of others, in {disk_name}"
        elif isinstance(held, list):
            held.append(piece)
    for name, held in found.items():
        if isinstance(held, list) and sum(_num_rows(piece, markers[name]) for piece in held) != markers[name].numel():
            found[name] = "names: on disk some of its rows are missing"
    return found


def _num_rows(piece: Piece, marker: torch.Tensor) -> int:
    return marker[..., piece.rows, :].numel() if piece.matrix is None else marker[piece.matrix, piece.rows].numel()


def _piece(name: str, rows: torch.Tensor, start: int, weight: torch.Tensor) -> Piece | None:
    """The piece of a weight whose rows carry these numbers; None if they are not neighbours in one of its matrices."""
    numbers = rows.flatten() - start
    first, count = int(numbers[0]), numbers.numel()
    num_rows = weight.shape[-2]
    if rows.shape[-1:] != (1,) or not torch.equal(numbers, torch.arange(first, first + count)):
        return None
    if rows.shape == (*weight.shape[:-1], 1):
        return Piece(name, None, slice(0, num_rows))
    matrix, offset = divmod(first, num_rows)
    if rows.dim() != 2 or weight.dim() != 3 or offset + count > num_rows:
        return None if weight.dim() == 3 or rows.dim() != 2 else Piece(name, None, slice(first, first + count))
    return Piece(name, matrix, slice(offset, offset + count))


def tied_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of Parameters that have several, each with the one that is written: the one that is not tied to another by the
    model's own account, else the first."""
    declared: Any = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[int, str] = {}
    for name in sorted(tensors, key=lambda n: n in declared):
        first.setdefault(id(tensors[name]), name)
    return {name: kept for name, t in tensors.items() if (kept := first[id(t)]) != name}


def layers(names: Iterable[str]) -> list[list[str]]:
    """Names in groups: those below one number, such as `layers.3`, and each of the others alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        groups.setdefault(name if number is None else ".".join(parts[: number + 1]), []).append(name)
    return list(groups.values())
