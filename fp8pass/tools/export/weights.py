"""The Parameters of a compiled model: how forward GEMMs read them in FP8, and their names on disk.

A Parameter counts as read in FP8 if every forward GEMM that reads it does so in one way, and nothing that can be seen reads it
in high precision. For some models of transformers, names on disk are not those in memory: it keeps the experts of a layer in
one Parameter, and writes a matrix of each expert, gate and up apart. `revert_weight_conversion`, which `save_pretrained` calls,
here converts markers, which number the rows of weights, so that FP8 values and scales can be cut as the weights are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8pass.graph.origin import TensorName
from fp8pass.recipes import Quantization, Recipe
from fp8pass.rewrite.report import WeightRecord
from fp8pass.runtime.instances import Placement, without_wrappers, wrapper_paths
from fp8pass.runtime.session import CompiledGraph, Part, Session
from fp8pass.scales.store import DelayedStore


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """The way in which forward GEMMs read a Parameter in FP8."""

    weight: Quantization
    input: Quantization  # The quantization of the other operand.
    recipe: Recipe
    dtype: torch.dtype  # The dtype in which the graph receives the Parameter: its own, except with FSDP2's mixed precision.
    store: DelayedStore | None = None  # The state that scales come from.
    weight_scale: str | None = None  # The names of scales in the state; None where a tensor takes its own.
    input_scale: str | None = None
    fused: tuple[str, ...] = ()  # The names of all Parameters that have one scale together, its own among them.

    def scale(self, name: str | None) -> torch.Tensor | None:
        """A copy of a scale in the state, by which the next forward multiplies: float32, a scalar, or [E] for E batched
        weights. None where a tensor takes its own: by its recipe, or because no amax has entered the history."""
        if self.store is None or name is None or self.store.needs_first_step([name]):
            return None
        return self.store.scale[self.store.where(name)].clone()


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `model.state_dict()` themselves, by their names without the parts that wrappers add."""
    wrapped = wrapper_paths(model)
    state = model.state_dict(keep_vars=True)
    return {without_wrappers(k, wrapped): v for k, v in state.items() if isinstance(v, torch.Tensor)}


def find_weights(parts: Sequence[Part], model: nn.Module) -> dict[str, Fp8Weight | str]:
    """Each Parameter that a forward GEMM has read, by all of its names: how it is read in FP8, or why it is not."""
    tensors = named_tensors(model)
    reads: dict[int, list[Fp8Weight | str]] = {}
    for part in parts:
        for graph, placements in part.session.graphs.items():
            for placement in placements:
                for record in graph.rewrite.weights if graph.rewrite else []:
                    name = _parameter(part, graph, placement, record.input, tensors)
                    if name is not None:
                        others = [_parameter(part, graph, placement, index, tensors) for index in record.fused]
                        read = _read(part.session, graph, placement, record, tensors[name], others)
                        reads.setdefault(id(tensors[name]), []).append(read)
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {key: _one(held, key in embedded) for key, held in reads.items()}
    return {name: found[id(tensor)] for name, tensor in tensors.items() if id(tensor) in found}


def _parameter(
    part: Part, compiled: CompiledGraph, placement: Placement, index: int | None, tensors: Mapping[str, torch.Tensor]
) -> str | None:
    given = compiled.inputs[index] if index is not None and index < len(compiled.inputs) else None
    if given is None or given.path is None or not given.is_parameter:
        return None
    name = part.outer(placement.name_module(given.path))
    return name if name in tensors else None


def _read(
    session: Session,
    compiled: CompiledGraph,
    placement: Placement,
    record: WeightRecord,
    parameter: torch.Tensor,
    others: Sequence[str | None],
) -> Fp8Weight | str:
    """One read of a Parameter. others: the names of those that share its scale."""
    if record.reason is not None:
        return record.reason
    if tuple(parameter.shape) != record.shape:
        return f"shape: its GEMM reads {list(record.shape)} of its {list(parameter.shape)}, a shard or a reshape"
    if record.is_turned:
        return f"layout: it is stored as {list(parameter.shape)}, inputs first; the formats hold [outputs, inputs]"
    recipe = record.recipe
    assert record.weight is not None
    assert record.input_operand is not None
    assert recipe is not None
    (weight, weight_name), (other, other_name) = record.weight, record.input_operand
    if None in others:
        return "scales: it shares its scale with a weight that is not a Parameter"

    stores = (s for s in session.stores if s.recipe == recipe and s.device == compiled.device)
    store = None if weight_name is None and other_name is None else next(stores)

    def state(name: TensorName | None) -> str | None:
        if name is None or store is None:
            return None
        return str(session.stores.name_under(store.recipe, placement.name_tensor(name)))

    fused = tuple(name for name in others if name is not None)
    return Fp8Weight(weight, other, recipe, record.dtype, store, state(weight_name), state(other_name), fused)


def _one(reads: Sequence[Fp8Weight | str], is_embedding: bool) -> Fp8Weight | str:
    """The reads of one Parameter as one, or why they do not agree."""
    reasons = [read for read in reads if isinstance(read, str)]
    if reasons:
        return reasons[0]
    kept = [read for read in dict.fromkeys(reads) if isinstance(read, Fp8Weight)]
    if is_embedding:
        return "tied: an embedding reads it in high precision"
    if len({(read.weight, read.input, read.dtype, frozenset(read.fused)) for read in kept}) > 1:
        return "several GEMMs read it, quantized in different ways"
    if len({tuple(_column(read.store, name) for name in (read.weight_scale, read.input_scale)) for read in kept}) > 1:
        return "scales: several GEMMs read it, with inputs that have scales of their own, and the formats hold one"
    if kept[0].input_scale is not None and kept[0].scale(kept[0].input_scale) is None:
        return "scales: no step has recorded an amax of its input; train one step first"
    return kept[0]


def _column(store: DelayedStore | None, name: str | None) -> tuple[int, int] | None:
    return None if store is None or name is None else (id(store), store.column(name))


# -- names on disk


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a weight, under one name on disk."""

    name: str
    matrix: int | None  # Its matrix of a batch [E, N, K]; None for a matrix, and for the whole of a batch.
    rows: slice


def is_pretrained(model: nn.Module) -> bool:
    """Say whether a model is one of transformers."""
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
    """The pieces in which weights, matrices [N, K] or batches [E, N, K], are on disk, or why that cannot be said."""
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
