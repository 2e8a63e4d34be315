"""Every tensor of an export, in order, and how it is made: one layer after the other.

The plan is made of shapes alone. Data are read, gathered from FSDP2's shards and quantized when a layer is iterated, a weight
at a time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import lowering
from fp8pass.errors import ExportError, InvariantError, preview
from fp8pass.graph.origin import family
from fp8pass.recipes import Granularity, Quantization
from fp8pass.rewrite.plan import Siblings, place_among_siblings
from fp8pass.runtime.session import Part
from fp8pass.schemes.eager import bytes_and_scales, quantize_weight
from fp8pass.tools.export.formats import CheckpointFormat, ScaleKind, ScaleNames, StoredScheme, is_skipped, kind_of
from fp8pass.tools.export.weights import (
    Fp8Weight,
    Piece,
    find_weights,
    is_pretrained,
    layers,
    named_tensors,
    output_embedding,
    pieces_of,
    tied_names,
    to_disk,
    unwrapped_modules,
)
from fp8pass.weights.cache import CachedWeight
from fp8pass.weights.released import MESSAGE
from fp8pass.weights.released import copies_of as released_copies
from lowering.copies import stacked
from lowering.formats import BLOCK, E4M3

NamedTensors = Iterator[tuple[str, torch.Tensor]]
MakeWhole = Callable[[torch.Tensor], torch.Tensor]


Entry = tuple[str, torch.Tensor]
"""A tensor of the checkpoint: its name, and one of its dtype and shape without memory."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Tensors that are made one after the other."""

    name: str
    entries: tuple[Entry, ...]
    make: Callable[[MakeWhole], NamedTensors]  # Makes them in the order of `entries`, of a function's results for `sources`.
    sources: tuple[torch.Tensor, ...]  # The tensors that they are made of, in the order in which those are read.

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(like.nbytes for _, like in self.entries)

    def tensors(self, gather: MakeWhole) -> NamedTensors:
        """The tensors, checked against the entries. gather: makes a source whole, such as `whole`."""
        for (planned, like), (name, tensor) in zip(self.entries, self.make(gather), strict=True):
            if (name, tensor.dtype, tensor.shape) != (planned, like.dtype, like.shape):
                what = f"{planned}, {like.dtype} {list(like.shape)}"
                raise InvariantError(f"{name} was planned as {what} and is {tensor.dtype} {list(tensor.shape)}")
            yield name, tensor


@dataclasses.dataclass(frozen=True)
class Written:
    """A weight that was written in FP8."""

    name: str
    """Its name in the model."""
    scales: str
    recipe: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Contents:
    """Everything that an export writes."""

    layers: list[Layer]
    config: dict[str, Any]  # `quantization_config`.
    written: list[Written]
    kept: dict[str, str]  # Parameters with two dimensions or more that are in high precision -> why, by names in the model.
    tied: dict[str, str]  # Other names of written tensors -> the name on disk.
    renamed: dict[str, Entry]  # Scales on disk -> the entries that transformers reads in their place.
    unequal: list[str]  # Projections that engines fuse and that are not alike, which they do not read: a sentence each.


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight that is written in FP8."""

    name: str
    parameter: torch.Tensor
    weight: Fp8Weight
    scheme: StoredScheme
    pieces: tuple[Piece, ...]
    others: tuple[torch.Tensor, ...] = ()  # The tensors that share its scale.

    @property
    def in_experts(self) -> bool:
        """True if the pieces are those of experts."""
        return any(piece.matrix is not None for piece in self.pieces)


def plan_contents(parts: Sequence[Part], model: nn.Module, fmt: CheckpointFormat) -> Contents:
    """Everything that an export of a model writes. Raises ExportError if no weight can be written in FP8."""
    everything = named_tensors(model)
    tied = tied_names(model, everything)
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tensors = {name: t for name, t in everything.items() if name not in tied and name not in ignored}
    found = find_weights(parts, model)
    stored, kept = _split(model, tensors, found, tied, fmt)
    if not stored:
        hint = "" if found else " Call the compiled model before it is exported."
        raise ExportError(
            f"no weight of {type(model).__name__} can be written in FP8 as {fmt.name!r}. {_summary(kept)}.{hint}"
            f" print(fp8pass.inspect(model)) shows which GEMMs run in FP8"
        )
    planned = [_layer(model, {n: tensors[n] for n in names}, stored, fmt) for names in layers(tensors)]
    names = [name for layer in planned for name, _ in layer.entries]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ExportError(f"two tensors would be called {preview(twice)} on disk; keep them in high precision by rules")
    schemes: dict[StoredScheme, set[str]] = {}
    for s in stored.values():
        schemes.setdefault(s.scheme, set()).update(_module(p.name) for p in s.pieces)
        schemes[s.scheme].update(_module(name) for name in (s.name, *(n for n, first in tied.items() if first == s.name)))
    held_back = _kept_modules(model, everything, set().union(*schemes.values()))
    config = fmt.config(schemes, held_back, output_embedding(model))
    written = [Written(s.name, s.scheme.kind.value, s.weight.recipe.name, tuple(s.parameter.shape)) for s in stored.values()]
    on_disk = {name: stored[first].pieces[0].name if first in stored else first for name, first in tied.items()}
    renamed = dict(_renamed(stored.values(), fmt)) if is_pretrained(model) else {}
    unequal = _unequal_projections(written, kept) if is_pretrained(model) else []
    return Contents(planned, config, written, kept, on_disk, renamed, unequal)


def _summary(kept: Mapping[str, str]) -> str:
    """The most frequent reasons, each with the first Parameter that has it."""
    counts = Counter(kept.values())
    first = {why: name for name, why in reversed(list(kept.items()))}
    return "; ".join(f"{first[why]}: {why}" for why, _ in counts.most_common(3)) or "It has no matrices"


# -- what is written in FP8


def _split(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, Fp8Weight | str],
    tied: Mapping[str, str],
    fmt: CheckpointFormat,
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The weights that are written in FP8, and why the other matrices are not."""
    kept: dict[str, str] = {}
    others_of = {first: name for name, first in tied.items()}
    candidates: dict[str, tuple[Fp8Weight, StoredScheme]] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not isinstance(tensor, nn.Parameter) or not tensor.dtype.is_floating_point:
            continue
        weight = found.get(name, _not_read(model, name))
        kind = None if isinstance(weight, str) else kind_of(weight)
        if isinstance(weight, str):
            kept[name] = weight
        elif kind is None:
            kept[name] = f"scales: {weight.recipe} quantizes weight and input in a way that no format has"
        elif (reason := _loader_obstacle(model, name, tensor, others_of.get(name))) is not None:
            kept[name] = reason
        else:
            candidates[name] = weight, StoredScheme.of(fmt.kind(kind), weight)
    stored: dict[str, Stored] = {}
    for names in layers(candidates):
        pieces = pieces_of(model, {n: tensors[n] for n in names})
        for name in names:
            weight, scheme = candidates[name]
            there = pieces[name]
            reason = there if isinstance(there, str) else _obstacle(model, tensors[name], scheme, there, fmt)
            if reason is not None or isinstance(there, str):
                kept[name] = str(reason)
            else:
                others = tuple(tensors[n] for n in weight.fused if tensors[n] is not tensors[name])
                stored[name] = Stored(name, tensors[name], weight, scheme, tuple(there), others)
    if not fmt.has_several_schemes:
        # The scheme of most elements is kept.
        sizes: dict[StoredScheme, int] = {}
        for s in stored.values():
            sizes[s.scheme] = sizes.get(s.scheme, 0) + s.parameter.numel()
        for s in [s for s in stored.values() if s.scheme != max(sizes, key=lambda k: sizes[k])]:
            kept[s.name] = f"scales: a checkpoint of format {fmt.name!r} has one kind of scales, and this weight another"
            del stored[s.name]
    # Loaders convert all weights of the experts of a layer, or none.
    for s in [s for s in stored.values() if s.parameter.dim() == 3]:
        other = next((n for n in kept if _module(n) == _module(s.name)), None)
        if other is not None and s.in_experts:
            kept[s.name] = f"experts: {other} is kept in high precision"
            del stored[s.name]
    return stored, kept


def _not_read(model: nn.Module, name: str) -> str:
    if isinstance(_owner(model, name), nn.Embedding):
        return "embedding: no GEMM reads it"
    return "no forward GEMM that has run reads it unchanged"


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The module that a tensor belongs to, where its name leads to it without wrappers."""
    try:
        return model.get_submodule(_module(name))
    except AttributeError:
        return None


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _loader_obstacle(model: nn.Module, name: str, tensor: torch.Tensor, other: str | None) -> str | None:
    """Why loaders of transformers' models would not read a tensor in FP8. other: another of its names."""
    if not is_pretrained(model):
        return None
    if other is not None:
        return f"tied: it is {other} as well, and loaders tie weights without their scales"
    kept: Any = getattr(model, "_keep_in_fp32_modules", None) or ()
    if any(is_skipped(_module(name), pattern) for pattern in kept):
        return (
            f"precision: transformers keeps {_module(name).rpartition('.')[2]} of {type(model).__name__} from being converted"
        )
    owner = _owner(model, name)
    if type(owner) is nn.Linear:
        return None
    if tensor.dim() == 3 and _module(name).endswith("experts") and owner is not None:
        biases = [n for n, _ in owner.named_parameters(recurse=False) if n.endswith("bias")]
        return f"experts: loaders know none with a bias ({biases[0]})" if biases else None
    return f"module: loaders read FP8 in nn.Linear and in experts, and this is in {type(owner).__name__}"


def _obstacle(
    model: nn.Module, tensor: torch.Tensor, scheme: StoredScheme, pieces: Sequence[Piece], fmt: CheckpointFormat
) -> str | None:
    """Why a weight cannot be written in these pieces."""
    rows, columns = tensor.shape[-2:]
    if is_pretrained(model) and tensor.dim() == 3 and pieces[0].matrix is None:
        return "experts: on disk they are one tensor, whose scales loaders do not read"
    if is_pretrained(model) and scheme.kind is ScaleKind.BLOCK and columns % BLOCK:
        return f"shape: K is {columns}, and loaders divide inputs into groups of {BLOCK}"
    for piece in pieces:
        count = piece.rows.stop - piece.rows.start
        if scheme.kind is ScaleKind.BLOCK and (
            piece.rows.start % BLOCK or (piece.rows.stop % BLOCK and piece.rows.stop != rows)
        ):
            return f"shape: on disk {piece.name} begins within a {BLOCK}x{BLOCK} block"
        if (reason := fmt.obstacle(scheme, count, columns, piece.matrix is not None)) is not None:
            return reason
    return None


def _kept_modules(model: nn.Module, tensors: Mapping[str, torch.Tensor], converted: set[str]) -> list[str]:
    """The modules in high precision that loaders might take for FP8 ones, by their names in memory and on disk. A loader goes
    by the modules of the model that it builds, not by the tensors of the checkpoint. So every Linear counts, also one whose
    weight is tied and saved under another name, and one that has never run."""
    names = {name for name, module in unwrapped_modules(model) if isinstance(module, nn.Linear)}
    others = (nn.Embedding, nn.modules.conv._ConvNd)
    matrices = {n: t for n, t in tensors.items() if t.dim() >= 2 and t.is_floating_point()}
    weights = {n: t for n, t in matrices.items() if not isinstance(_owner(model, n), others)}
    for group in layers(n for n in weights if _module(n) not in converted):
        shapes = {n: _empty(weights[n].shape, weights[n].dtype) for n in group}
        names.update(_module(n) for n in (*group, *to_disk(model, shapes)))
    return sorted(name for name in names if name and name not in converted)


def _unequal_projections(written: Iterable[Written], kept: Iterable[str]) -> list[str]:
    """Sentences on the projections of one layer that engines fuse and refuse: `_match_fused_layer`, `is_layer_skipped` and
    `validate_fp8_block_shape` in vLLM 0.33."""
    scales = {w.name: w.scales for w in written} | dict.fromkeys(kept, "high precision")
    rows = {w.name: w.shape[0] for w in written}
    groups: dict[Siblings, dict[str, str]] = {}
    for name in scales:
        if name.endswith(".weight") and (place := place_among_siblings(_module(name))) is not None:
            groups.setdefault(place[0], {})[place[1]] = name
    found: Counter[str] = Counter()
    for (before, behind, _), members in groups.items():
        held = {short: scales[name] for short, name in members.items()}
        text = ""
        if len(set(held.values())) > 1:
            text = ", ".join(f"{short}: {how}" for short, how in held.items())
        elif ScaleKind.BLOCK.value in held.values():
            parts = {short: rows[name] for short, name in list(members.items())[:-1]}
            text = ", ".join(f"{short} has {n} rows, not whole blocks" for short, n in parts.items() if n % BLOCK)
        if text:
            found[f"{family(before + '{' + ','.join(held) + '}' + behind)} ({text})"] += 1
    return [
        f"{where}{f' (x{count})' if count > 1 else ''}: engines fuse these projections, and raise an error unless all have one"
        f" kind of scales, in whole blocks, or all high precision. Decide them together by rules"
        for where, count in found.items()
    ]


# -- layers


def _layer(model: nn.Module, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Stored], fmt: CheckpointFormat) -> Layer:
    here = [stored[name] for name in tensors if name in stored]
    others = {name: t for name, t in tensors.items() if name not in stored}
    shapes = {name: _empty(t.shape, t.dtype) for name, t in others.items()}
    entries = [entry for s in here for entry in _entries(s, fmt)]
    entries += to_disk(model, shapes).items()

    def make(gather: MakeWhole) -> NamedTensors:
        for s in here:
            yield from _tensors(s, fmt, gather)
        yield from to_disk(model, {name: gather(t) for name, t in others.items()}).items()

    sources = (*(t for s in here for t in (s.parameter, *s.others)), *others.values())
    return Layer(next(iter(tensors)), tuple(entries), make, sources)


def _names(piece: Piece, names: ScaleNames) -> tuple[str, str]:
    """The names of the scales of a piece, and of the scale of its input."""
    of_weight, of_input = names
    if piece.name.endswith(".weight") or piece.name == "weight":
        base = piece.name.removesuffix("weight")
        return base + of_weight, base + of_input
    return f"{piece.name}_{of_weight.removeprefix('weight_')}", f"{piece.name}_{of_input}"


def _renamed(stored: Iterable[Stored], fmt: CheckpointFormat) -> Iterator[tuple[str, Entry]]:
    """Names of scales, each with the entry that transformers reads in its place."""
    for s in stored:
        here, theirs = fmt.names(s.scheme.kind), fmt.names_in_transformers(s.scheme.kind)
        for piece in s.pieces if theirs != here else ():
            (scale, static), (its_scale, its_static) = _names(piece, here), _names(piece, theirs)
            yield scale, (its_scale, _empty(() if piece.matrix is None else (1, 1)))
            if s.weight.input_scale is None:
                continue
            if piece.matrix is None:
                yield static, (its_static, _empty(()))
            elif piece is s.pieces[0]:  # it merges the weights of experts and their scales, and not those of their inputs
                yield static, (f"{s.name}_{theirs[1]}", _empty(s.parameter.shape[:1]))


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _entries(s: Stored, fmt: CheckpointFormat) -> Iterator[Entry]:
    columns = s.parameter.shape[-1]
    dtype = torch.uint8 if s.scheme.kind is ScaleKind.MX else torch.float32
    for piece in s.pieces:
        rows = piece.rows.stop - piece.rows.start
        batch = s.parameter.shape[:1] if s.parameter.dim() == 3 and piece.matrix is None else ()
        shape = (*batch, *s.scheme.scale_shape(rows, columns))
        scale = fmt.stored_scale(s.scheme, _empty(shape, dtype))
        scale_name, input_name = _names(piece, fmt.names(s.scheme.kind))
        yield piece.name, _empty((*batch, rows, columns), E4M3)
        yield scale_name, scale
        if s.weight.input_scale is not None:
            yield input_name, fmt.stored_scale(s.scheme, _empty(()))


def _tensors(s: Stored, fmt: CheckpointFormat, gather: MakeWhole) -> NamedTensors:
    """Data, scales and the scale of the input, for each piece."""
    is_hollow = bool(released_copies(s.parameter))
    weight = s.parameter if is_hollow else gather(s.parameter).to(s.weight.dtype)
    scales, inputs = s.weight.scale(s.weight.weight_scale), s.weight.scale(s.weight.input_scale)
    amax = None
    if s.others and not is_hollow:
        amaxes = [lowering.amax(gather(t).to(s.weight.dtype)) for t in s.others]
        amax = torch.stack([lowering.amax(weight), *amaxes]).amax()
    made: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
    for piece in s.pieces:
        if piece.matrix not in made:  # one at a time is kept
            made = {piece.matrix: _quantized(weight, piece.matrix, s, scales, amax)}
        data, scale_inv = made[piece.matrix]
        scale_name, input_name = _names(piece, fmt.names(s.scheme.kind))
        yield piece.name, data[..., piece.rows, :].contiguous()
        cut = _cut(scale_inv, piece.rows, s.scheme.kind)
        yield scale_name, fmt.stored_scale(s.scheme, cut).contiguous()
        if inputs is not None:
            yield input_name, fmt.stored_scale(s.scheme, inputs.reciprocal())


def _quantized(
    weight: torch.Tensor, matrix: int | None, s: Stored, scales: torch.Tensor | None, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and scales of a matrix, of one of a batch, or of a whole batch. scales: those from the state. amax: that of
    all weights that share the scale."""
    if held := released_copies(weight):
        return _quantized_before(held, s.weight.weight, matrix)
    if weight.dim() == 2:
        return quantize_weight(weight.contiguous(), s.weight.weight, scales, amax)
    if matrix is not None:
        return quantize_weight(weight[matrix].contiguous(), s.weight.weight, None if scales is None else scales[matrix])
    return stacked(_quantized(weight, i, s, scales) for i in range(weight.shape[0]))


def _quantized_before(
    held: Sequence[CachedWeight], quantization: Quantization, matrix: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_weight` of a Parameter that gave its values back, from the copies that it holds. matrix: one of a batch."""
    found = next((w for w in held if w.quantization == quantization and w.made is not None), None)
    if found is None or found.made is None:
        raise ExportError(f"no copy of {list(held[0].shape)} is quantized as its forward GEMM reads it: {MESSAGE}")
    layout, data = next(iter(found.made.data.items()))
    data, scales = bytes_and_scales(quantization, layout, data, found.made.scale_inv[layout], found.shape)
    if matrix is not None:
        data, scales = data[matrix], scales[matrix]
    granularity = quantization.granularity
    if quantization.has_one_scale:
        return data, scales[..., 0, 0].clone()
    rows, columns = granularity.block or (1, scales.shape[-1])
    scales = scales[..., ::rows, ::columns].contiguous()
    if granularity is Granularity.BLOCK_1X32:
        scales = (scales.log2().round() + 127).nan_to_num(255).to(torch.uint8)
    return data, scales


def _cut(scales: torch.Tensor, rows: slice, kind: ScaleKind) -> torch.Tensor:
    """The scales of some rows."""
    if kind in (ScaleKind.STATIC, ScaleKind.TENSOR, ScaleKind.TENSOR_TOKEN):
        return scales
    height = BLOCK if kind is ScaleKind.BLOCK else 1
    return scales[..., rows.start // height : (rows.stop + height - 1) // height, :]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its gradient, gathered from all ranks if it is a DTensor: a collective call."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
