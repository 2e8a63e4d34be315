"""Which Parameters forward GEMMs read in FP8, and how: read off the rewritten graphs of a compiled model.

A Parameter counts as read in FP8 if every forward GEMM that reads it does so in one way, and nothing that can be seen reads it
in high precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fp8pass.recipes import Quantization, Recipe
from fp8pass.rewrite.report import OperandRecord, WeightRecord
from fp8pass.runtime.instances import Placement, without_wrappers, wrapper_paths
from fp8pass.runtime.session import CompiledGraph, Part, Session
from fp8pass.scales.store import DelayedStore


@dataclasses.dataclass(frozen=True)
class FromState:
    """Where a scale is in the state of delayed scaling."""

    store: DelayedStore
    name: str

    @property
    def is_empty(self) -> bool:
        """Whether no amax has entered the history yet, so that the tensor takes its scale from itself."""
        return self.store.needs_first_step([self.name])

    def scale(self) -> torch.Tensor:
        """What the next forward multiplies the tensor by: float32, a scalar, or [E] for E batched weights. A copy."""
        return self.store.scale[self.store.where(self.name)].clone()


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """How forward GEMMs read a Parameter in FP8."""

    weight: Quantization
    input: Quantization
    """What the other operand becomes."""
    recipe: Recipe
    dtype: torch.dtype
    """In which the graph receives the Parameter: that of the Parameter itself but for FSDP2's mixed precision."""
    weight_scale: FromState | None = None
    input_scale: FromState | None = None
    fused: tuple[str, ...] = ()
    """The names of all Parameters that have one scale together, its own among them."""


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `model.state_dict()` themselves, by their names without the parts that wrappers add."""
    wrapped = wrapper_paths(model)
    state = model.state_dict(keep_vars=True)
    return {without_wrappers(k, wrapped): v for k, v in state.items() if isinstance(v, torch.Tensor)}


def find_weights(parts: Sequence[Part], model: nn.Module) -> dict[str, Fp8Weight | str]:
    """What becomes of each Parameter that a forward GEMM has read, by all of its names: how it is read in FP8, or why it is
    not."""
    tensors = named_tensors(model)
    reads: dict[int, list[Fp8Weight | str]] = {}
    for part in parts:
        for graph, placements in part.session.graphs.items():
            for placement in placements:
                for record in graph.rewrite.weights if graph.rewrite else []:
                    name = _parameter(part, graph, placement, record.input, tensors)
                    if name is not None:
                        read = _read(part.session, graph, placement, record, tensors[name])
                        read = _with_others(read, part, graph, placement, record, tensors)
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


def _with_others(
    read: Fp8Weight | str,
    part: Part,
    compiled: CompiledGraph,
    placement: Placement,
    record: WeightRecord,
    tensors: Mapping[str, torch.Tensor],
) -> Fp8Weight | str:
    """The same with the Parameters that share its scale."""
    if isinstance(read, str):
        return read
    names = [_parameter(part, compiled, placement, index, tensors) for index in record.fused]
    if None in names:
        return "scales: it shares its scale with a weight that is not a Parameter"
    return dataclasses.replace(read, fused=tuple(name for name in names if name is not None))


def _read(
    session: Session, compiled: CompiledGraph, placement: Placement, record: WeightRecord, parameter: torch.Tensor
) -> Fp8Weight | str:
    if record.reason is not None:
        return record.reason
    if tuple(parameter.shape) != record.shape:
        return f"shape: its GEMM reads {list(record.shape)} of its {list(parameter.shape)}, a shard or a reshape"
    if record.is_turned:
        return f"layout: it is stored as {list(parameter.shape)}, inputs first; the formats hold [outputs, inputs]"
    assert record.weight is not None
    assert record.input_operand is not None
    assert record.recipe is not None

    def state(operand: OperandRecord) -> FromState | None:
        if operand.state_name is None:
            return None
        store = next(s for s in session.stores if s.recipe == record.recipe and s.device == compiled.device)
        return FromState(store, str(session.stores.name_under(store.recipe, placement.name_tensor(operand.state_name))))

    weight, other = record.weight, record.input_operand
    return Fp8Weight(weight.quantization, other.quantization, record.recipe, record.dtype, state(weight), state(other))


def _one(reads: Sequence[Fp8Weight | str], is_embedding: bool) -> Fp8Weight | str:
    """What the reads of one Parameter come to."""
    reasons = [read for read in reads if isinstance(read, str)]
    if reasons:
        return reasons[0]
    kept = [read for read in dict.fromkeys(reads) if isinstance(read, Fp8Weight)]
    if is_embedding:
        return "tied: an embedding reads it in high precision"
    if len({(read.weight, read.input, read.dtype, frozenset(read.fused)) for read in kept}) > 1:
        return "several GEMMs read it, quantized in different ways"
    if len({(_column(read.weight_scale), _column(read.input_scale)) for read in kept}) > 1:
        return "scales: several GEMMs read it, with inputs that have scales of their own, and the formats hold one"
    if kept[0].input_scale is not None and kept[0].input_scale.is_empty:
        return "scales: no step has recorded an amax of its input; train one step first"
    return kept[0]


def _column(scale: FromState | None) -> tuple[int, int] | None:
    return None if scale is None else (id(scale.store), scale.store.column(scale.name))
