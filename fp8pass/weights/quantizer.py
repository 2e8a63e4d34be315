"""The small graph that quantizes weights outside of the graphs that read them, in one launch per kind.

It is made by the same emitters as the casts within a graph, so that a kept copy has the bytes and scales of one that is made
there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.errors import InvariantError
from fp8pass.graph.casts import Layout
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import MatrixValue
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes.copies import Cast, Copy, FromValue, Quantized, QuantizedTensor
from fp8pass.schemes.delayed import DelayedEmitter
from fp8pass.schemes.scheme import FIRST_STEP, Read, Scope, StateNodes
from fp8pass.schemes.table import scheme_of
from fp8pass.schemes.tensorwise import TensorEmitter

_NAME = TensorName("weight", "weight")
Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class CastKind:
    """What weights that are quantized by one launch have in common."""

    recipe: Recipe
    quantization: Quantization
    layouts: tuple[Layout, ...]
    """Of the copies: one or both orientations, rowwise first."""
    dtype: torch.dtype
    """Of the Parameters."""
    device: torch.device
    is_first: bool = False
    """Whether scales of the state may be 0, for an empty history: such a weight takes its scale from itself."""

    @property
    def has_state(self) -> bool:
        """Whether scales come from the state."""
        return self.quantization.scale_from is ScaleFrom.STATE


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """What a quantizer made of one weight."""

    data: tuple[torch.Tensor, ...]
    """Per layout."""
    scale_inv: tuple[torch.Tensor, ...]
    """Per layout, as the GEMMs read it."""
    scale: torch.Tensor | None = None
    """By which it was multiplied, where that came from the state: a scalar, or [batch]."""
    amax: torch.Tensor | None = None
    """Its largest magnitude, in the same cases."""


def quantize(kind: CastKind, weights: Sequence[torch.Tensor], scale: torch.Tensor | None) -> list[Made]:
    """Quantize matrices and batches. scale: [entries] float32, those of all weights in the state, in order; None for kinds
    without state. The results share no memory with the arguments, and each begins at a multiple of 16 bytes."""
    extra = [] if scale is None else [scale, torch.arange(scale.numel(), device=scale.device)]
    return _run(_module(kind, _shapes(weights)), kind, [*weights, *extra])


def quantize_together(kind: CastKind, weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[Made]:
    """The same of matrices that have one scale, of a kind without state. others: what has that scale besides them."""
    return _run(_module(kind, _shapes(weights), _shapes(others)), kind, [*weights, *others])


def _run(module: fx.GraphModule, kind: CastKind, args: Sequence[torch.Tensor]) -> list[Made]:
    # In inference mode they would be inference tensors, which no backward can save.
    with torch.inference_mode(False), torch.no_grad():
        return _split(kind, _aligned(module(*args)))


def _shapes(tensors: Sequence[torch.Tensor]) -> Shapes:
    return tuple(tuple(x.shape) for x in tensors)


def example(kind: CastKind, shape: tuple[int, ...]) -> Made:
    """Fake tensors of the shapes, strides and dtypes that `quantize` makes of one weight."""
    (output,) = _graph(kind, (shape,)).find_nodes(op="output")
    values = [node.meta["val"] for node in output.args[0]]
    return _split(kind, values)[0]


def _split(kind: CastKind, flat: Sequence[torch.Tensor]) -> list[Made]:
    copies = len(kind.layouts)
    width = 2 * copies + (2 if kind.has_state else 0)
    found = []
    for start in range(0, len(flat), width):
        part = flat[start : start + width]
        found.append(Made(tuple(part[:copies]), tuple(part[copies : 2 * copies]), *part[2 * copies :]))
    return found


def _aligned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Scales of several weights come as elements of a vector. Inductor takes inputs that begin at a multiple of 16 bytes as
    they are, and copies others."""
    scalars = [i for i, t in enumerate(tensors) if t.dim() == 0]
    found = [t if t.storage_offset() * t.element_size() % 16 == 0 else t.clone() for t in tensors]
    if scalars:
        padded = torch.stack([tensors[i] for i in scalars]).unsqueeze(1).repeat(1, 4)
        for i, row in zip(scalars, padded.unbind(), strict=True):
            found[i] = row[0]
    return found


@functools.lru_cache(maxsize=256)
def _module(kind: CastKind, shapes: Shapes, others: Shapes | None = None) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), _graph(kind, shapes, others))


def _graph(kind: CastKind, shapes: Shapes, others: Shapes | None = None) -> fx.Graph:
    """Weights, then what shares their scale, then their scales and slots where they have state -> what `_split` takes."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def placeholder(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=kind.device)
        return node

    matrices = [placeholder(f"weight_{i}", shape, kind.dtype) for i, shape in enumerate(shapes)]
    measured = [placeholder(f"other_{i}", shape, kind.dtype) for i, shape in enumerate(others or ())]
    tensors = [_tensor(kind, node, shape) for node, shape in zip(matrices, shapes, strict=True)]
    state = None
    if kind.has_state:
        size = (sum(t.entries for t in tensors),)
        scale, slots = placeholder("scale", size, torch.float32), placeholder("slots", size, torch.int64)
        state = StateNodes(scale, scale, scale, slots)
    output = graph.output(())
    cursor = Cursor(graph, output, False, None, mode)  # not that of a graph that is being compiled
    scope = Scope(tuple(tensors), state, True, frozenset({FIRST_STEP}) if kind.is_first else frozenset())
    emitter = scheme_of(kind.quantization).emitter(scope)
    emitter.begin(cursor)
    if others is not None:
        emitter.share(cursor, tensors, [*matrices, *measured])
    casts = [_cast(kind, tensor, output) for tensor in tensors]
    is_many = [i for i, shape in enumerate(shapes) if len(shape) == 2]
    launches = [is_many, *([i] for i, shape in enumerate(shapes) if len(shape) == 3)]
    made: dict[int, tuple[Quantized, ...]] = {}
    for launch in filter(None, launches):
        quantized = emitter.quantize(cursor, [casts[i] for i in launch], [Read(matrices[i]) for i in launch])
        made.update(zip(launch, quantized, strict=True))
    amaxes = dict(emitter.amaxes) if isinstance(emitter, DelayedEmitter) else {}
    results: list[fx.Node] = []
    for i, tensor in enumerate(tensors):
        results += [q.data for q in made[i]] + [q.scale_inv for q in made[i]]
        if kind.has_state:
            if not isinstance(emitter, TensorEmitter) or casts[i] not in amaxes:
                raise InvariantError(f"the cast of a weight of {kind.quantization} gave no amax")
            results += [emitter.scales[tensor][0], amaxes[casts[i]]]
    output.args = (tuple(results),)
    graph.eliminate_dead_code()
    return graph


def _tensor(kind: CastKind, node: fx.Node, shape: tuple[int, ...]) -> QuantizedTensor:
    batch, (rows, cols) = (None, shape) if len(shape) == 2 else (shape[0], shape[1:])
    return QuantizedTensor(MatrixValue(node, rows, cols, None, batch), kind.quantization, kind.recipe, _NAME)


def _cast(kind: CastKind, tensor: QuantizedTensor, at: fx.Node) -> Cast:
    """A cast of the whole weight, whatever GEMM will read it."""
    value = tensor.value
    site = GemmSite(at, "weight", None, "output", 0, value.rows, value.cols, "", None, None, False)
    copies = tuple(Copy(value, x.columnwise, tensor.quantization, tensor.recipe, tensor.name) for x in kind.layouts)
    return Cast(copies, kind.layouts, site, FromValue(), kind.dtype)
