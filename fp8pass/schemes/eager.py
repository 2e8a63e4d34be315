"""Quantize and dequantize outside of graphs: the operations that emitters and schemes insert, run on tensors.

So a cached copy, a shard that FSDP2 gathers, an exported weight and an operand that `suggest_rules` tries have the bytes and
scales of a copy that is made in a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowering
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.origin import Kind, TensorName
from fp8pass.graph.values import MatrixValue
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import ROWWISE, Cast, Copy, Layout, Quantized
from fp8pass.schemes.emitter import Emitter
from fp8pass.schemes.scheme import scaling
from lowering.copies import stacked
from lowering.formats import MX_BLOCK
from lowering.scaling import scales_from_amax

ops = torch.ops.lowering

_NONE: Any = None
_SITE = GemmSite(_NONE, "weight", None, "output", 0, 0, 0, "", (), False)  # The place of casts that are in no graph.


class _Eager(Cursor):
    """A cursor that runs operations instead of inserting them."""

    def __init__(self) -> None: ...

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def item(self, node: Any, index: int) -> Any:
        return node[index]

    def items(self, node: Any) -> list[Any]:
        return [node] if isinstance(node, torch.Tensor) else list(node)

    def size(self, node: Any, dim: int) -> Any:
        return node.shape[dim]

    def sharing(self, *others: Any) -> Cursor:
        return self


_EAGER = _Eager()


# -- weights and shards


@dataclasses.dataclass(frozen=True)
class CastKind:
    """The properties that weights have in common which one launch quantizes."""

    recipe: Recipe
    quantization: Quantization
    layouts: tuple[Layout, ...]  # Layouts of the copies: one or both orientations, rowwise first.
    dtype: torch.dtype  # The dtype of the Parameters.
    device: torch.device
    is_first: bool = False  # Scales of the state may be 0, for an empty history: such a weight takes its scale from itself.


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """The tensors that `quantize` makes of one weight."""

    data: tuple[torch.Tensor, ...]  # One per layout.
    scale_inv: tuple[torch.Tensor, ...]  # One per layout, as the GEMMs read it.
    scale: torch.Tensor | None = None  # The factor of the values, where it came from the state: a scalar, or [batch].
    amax: torch.Tensor | None = None  # The largest magnitude, in the same cases.


def quantize(
    kind: CastKind,
    weights: Sequence[torch.Tensor],
    scale: torch.Tensor | None = None,
    others: Sequence[torch.Tensor] | None = None,
) -> list[Made]:
    """Quantize matrices and batches, all matrices in one launch. scale: [entries] float32, those of all weights in the state,
    in order; None for kinds without state. others: the matrices that share one scale with all the weights, of a kind without
    state; None: weights have scales of their own. The results share no memory with the arguments, and each begins at a multiple
    of 16 bytes."""
    # In inference mode they would be inference tensors, which no backward can save.
    with torch.inference_mode(False), torch.no_grad():
        loaded = None
        if scale is not None:
            slots = torch.arange(scale.numel(), device=scale.device)
            loaded = ops.load_scales.default(scale, slots, scale.numel())
        made = _quantize(kind, weights, loaded, others)
        width = 2 * len(kind.layouts) + 2 * kind.quantization.has_state
        flat = _aligned([x for one in made for x in one])
        return [_made(kind, flat[start : start + width]) for start in range(0, len(flat), width)]


def example(kind: CastKind, shape: tuple[int, ...]) -> Made:
    """Fake tensors of the shapes, strides and dtypes that `quantize` makes of one weight."""
    with FakeTensorMode(), torch.no_grad():
        weight = torch.empty(shape, dtype=kind.dtype, device=kind.device)
        scale = torch.empty(shape[0] if len(shape) == 3 else 1, dtype=torch.float32, device=kind.device)
        (made,) = _quantize(kind, [weight], (scale, scale) if kind.quantization.has_state else None)
        return _made(kind, made)


def _made(kind: CastKind, flat: Sequence[torch.Tensor]) -> Made:
    count = len(kind.layouts)
    return Made(tuple(flat[:count]), tuple(flat[count : 2 * count]), *flat[2 * count :])


def _quantize(
    kind: CastKind,
    weights: Sequence[torch.Tensor],
    loaded: tuple[torch.Tensor, torch.Tensor] | None,
    others: Sequence[torch.Tensor] | None = None,
) -> list[list[torch.Tensor]]:
    """Data of the copies of each weight, their scales, and with a state its scale and its amax."""
    casts = [_cast(kind, x, "weight") for x in weights]
    tensors = [cast.tensor for cast in casts]
    emitter: Any = Emitter(scheme_of(kind.quantization), tensors, records=True, is_first=kind.is_first)
    emitter.loaded = loaded
    if others is not None:
        emitter.share(_EAGER, tensors, [*weights, *others])
    launches = [[i for i, x in enumerate(weights) if x.dim() == 2], *([i] for i, x in enumerate(weights) if x.dim() == 3)]
    copies: dict[int, tuple[Quantized, ...]] = {}
    for launch in filter(None, launches):
        made = emitter.quantize(_EAGER, [casts[i] for i in launch], [weights[i] for i in launch])
        copies.update(zip(launch, made, strict=True))
    found: list[list[Any]] = [[c.data for c in copies[i]] + [c.scale_inv for c in copies[i]] for i in range(len(weights))]
    if kind.quantization.has_state:
        amaxes = {id(cast): amax for cast, amax in emitter.amaxes}
        for cast, one in zip(casts, found, strict=True):
            one += [emitter.scales[cast.tensor][0], amaxes[id(cast)]]
    return found


def _cast(kind: CastKind, x: torch.Tensor, name: Kind) -> Cast:
    """The cast of a whole matrix or batch, whatever GEMM will read it."""
    batch, (rows, cols) = (None, x.shape) if x.dim() == 2 else (x.shape[0], x.shape[1:])
    root: Any = object()  # a tensor compares by its elements
    value = MatrixValue(root, rows, cols, None, batch)
    named = TensorName(name, name)
    copies = tuple(Copy(value, layout.columnwise, kind.quantization, kind.recipe, named) for layout in kind.layouts)
    return Cast(copies, kind.layouts, _SITE, None, kind.dtype)


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


def bytes_and_scales(
    quantization: Quantization, layout: Layout, data: torch.Tensor, scale_inv: Any, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 bytes of a copy of a weight [rows, cols] or [batch, rows, cols] without padding, and the float32 factor of each,
    of the same shape: views where that takes no more than a transpose."""
    if len(shape) == 3:
        of_each = [bytes_and_scales(quantization, layout, *one, shape[1:]) for one in zip(data, scale_inv, strict=True)]
        return stacked(of_each)
    rows, cols = shape
    q: Any = data
    factors: Any = scheme_of(quantization).ready_factors(_EAGER, q, scale_inv, quantization)
    factors = factors.expand(data.shape)
    if layout.columnwise:
        data, factors = data.t(), factors.t()
    return data[:rows, :cols], factors[:rows, :cols]


def quantize_weight(
    matrix: torch.Tensor, quantization: Quantization, scale: torch.Tensor | None = None, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of a matrix [N, K] and their factors: one per tensor [], row [N, 1], block [ceil(N/128), ceil(K/128)], all
    float32, or 32 values [N, ceil(K/32)], E8M0 codes in uint8. Nothing is padded. scale: the float32 scalar of a tensor whose
    scale comes from the state; None where it comes from the matrix. amax: of all that share one scale of a whole tensor; None:
    the matrix's own."""
    if not quantization.has_one_scale:
        data, scales = compact(matrix, quantization)
        if quantization.square:  # the GEMM reads one for each line of a tile
            scales = scales.repeat_interleave(MX_BLOCK, dim=0)[: matrix.shape[0]]
        return data, scales
    if scale is not None:
        return lowering.quantize(matrix, scale, quantization.dtype), scale.reciprocal()
    amax = lowering.amax(matrix) if amax is None else amax
    if quantization.has_state:
        scale = lowering.scale_from_amax(amax, quantization.dtype, margin=quantization.margin)
        scale_inv = scale.reciprocal()
    else:
        scale, scale_inv = scales_from_amax(amax, quantization.dtype, **scaling(quantization))
    return lowering.quantize(matrix, scale, quantization.dtype), scale_inv


def rounded(
    x: torch.Tensor, recipe: Recipe, quantization: Quantization, kind: Kind, parts: Sequence[slice] = ()
) -> torch.Tensor:
    """A matrix [outer, inner], or a batch of them, as FP8 holds it: float32 of the same shape. The GEMM sums over `inner`. A
    batch is one tensor; of weights, and with scales of lines or blocks, each matrix has scales of its own. A scale from the
    state is that of a tensor without a history: its own. parts: of `inner`, with each of which lines and blocks begin anew."""
    if x.dim() == 3 and (kind == "weight" or not quantization.has_one_scale):
        return torch.stack([rounded(matrix, recipe, quantization, kind) for matrix in x])
    if parts and not quantization.has_one_scale:
        return torch.cat([rounded(x[:, part], recipe, quantization, kind) for part in parts], 1)
    if not x.numel():
        return x.float()
    matrix = x.reshape(-1, x.shape[-1]).contiguous()
    cast = CastKind(recipe, quantization, (ROWWISE,), x.dtype, x.device, is_first=True)
    (made,) = quantize(cast, [matrix], torch.zeros(1, dtype=torch.float32, device=x.device) if quantization.has_state else None)
    data, scales = bytes_and_scales(quantization, ROWWISE, made.data[0], made.scale_inv[0], tuple(matrix.shape))
    return (data.float() * scales).reshape(x.shape)


# -- copies that travel


def compact(
    x: Any, quantization: Quantization, *, columnwise: bool = False, amaxes: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a copy as it travels, in the orientation of the matrix x [rows, columns]. amaxes: of columns that
    have one scale; None: those of x."""
    scheme = scheme_of(quantization)
    made: Any = scheme.compact(_EAGER, x, quantization, columnwise, amaxes)
    return made[1], made[2].t() if columnwise and scheme.scales_columns else made[2]


def ready(data: Any, scales: Any, quantization: Quantization, layout: Layout) -> tuple[torch.Tensor, ...]:
    """A copy as a GEMM reads it, and its scales, of a compact one."""
    scheme = scheme_of(quantization)
    scales = scales.t() if layout.columnwise and scheme.scales_columns else scales
    made: Any = scheme.ready(_EAGER, data, scales, quantization, MatrixValue(_NONE, *data.shape), layout)
    return tuple(made)


def compact_values(data: Any, scales: Any, quantization: Quantization) -> torch.Tensor:
    """float32 values of a compact copy."""
    factors: Any = scheme_of(quantization).compact_factors(_EAGER, data, scales, quantization)
    values: torch.Tensor = data.float().mul_(factors)
    return values
