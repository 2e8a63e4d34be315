"""Eager semantics of the blockwise operations, in plain torch. This is the specification: schemas are inferred from
these signatures, kernels are held against these results.

Blocks are 1x128 along the contraction dimension of a copy (1D below) or 128x128 (2D); `granularity` is a member of
`formats.Granularity` or its value. A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts: the
rowwise copy of x [R, C] is [R, C], the columnwise one [C, R].

NOTE [scale layouts]
compact      what travels through gathers: no padding, the orientation of its data.
             1D [outer, ceil(inner/128)], 2D [ceil(outer/128), ceil(inner/128)].
GEMM-ready   contiguous memory as cuBLASLt reads it, the last dimension padded to 4 with zeros.
             1D [ceil(inner/128), pad4(outer)] (transposed), 2D [ceil(outer/128), pad4(ceil(inner/128))].
batches      what grouped GEMMs read: compact, [E, outer, ...]. 1D by blocks, strides (.., 1, outer), so that the lines of a
             tile, which a GEMM reads at once, are together; the view covers its storage.
Of GEMM-ready scales the padded memory is returned, never a strided view of it. A view that does not cover its storage loses its
strides in `clone` and at graph boundaries, and a leading dimension without its padding gives silent wrong numbers
(pytorch/pytorch#166752). Only the GEMM makes views.

Formulas: docs/numerics.md; layouts: TransformerEngine's fp8_blockwise_scaling.rst. All functions take any device and
strides.
Checks raise a ValueError that names the value and the fix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowering import checks, scaling
from lowering.copies import CastOptions, dense, empty_copy, num_blocks, outer_and_inner, padded, stacked
from lowering.formats import BLOCK, SCALE_ALIGNMENT, Granularity, round_up
from lowering.products import Product, finished
from lowering.trials import ProductKind, fault_of_sizes


def gemm_ready_scale_shape(outer: int, inner: int, granularity: str) -> tuple[int, int]:
    """Shape of the GEMM-ready scales of a copy [outer, inner]; see NOTE [scale layouts]."""
    if granularity == Granularity.BLOCK_1X128:
        return num_blocks(inner, BLOCK), round_up(outer, SCALE_ALIGNMENT)
    return num_blocks(outer, BLOCK), round_up(num_blocks(inner, BLOCK), SCALE_ALIGNMENT)


def scale_shape(x: torch.Tensor, granularity: str, columnwise: bool, pad_outer: bool, compact: bool) -> tuple[int, ...]:
    """Shape of the scales that `cast_with_scales` returns with a copy of x."""
    outer, inner = outer_and_inner(x, columnwise, pad_outer and not compact)
    if x.dim() == 2 and not compact:
        return gemm_ready_scale_shape(outer, inner, granularity)
    if granularity == Granularity.BLOCK_128X128:
        outer, _ = outer_and_inner(x, columnwise)
    *batch, _, _ = x.shape
    shape = scaling.scale_shape(outer, inner, granularity)
    return (*batch, *(shape[::-1] if compact and columnwise else shape))


def empty_scales(x: torch.Tensor, granularity: str, columnwise: bool, pad_outer: bool, compact: bool) -> torch.Tensor:
    """The scales that `cast_with_scales` returns with a copy of x, to be filled: of this shape, in this layout."""
    shape = scale_shape(x, granularity, columnwise, pad_outer, compact)
    if x.dim() == 3 and granularity == Granularity.BLOCK_1X128:
        *batch, lines, num = shape
        return x.new_empty(*batch, num, lines, dtype=torch.float32).mT
    return x.new_empty(*shape, dtype=torch.float32)


def copy(
    x: torch.Tensor, dtype: torch.dtype, how: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of a matrix or of a batch, and its scales: `casts.cast_with_scales`."""
    options = dtype, how.granularity, how.power_of_2, how.epsilon, how.inverse
    if x.dim() == 2:
        q, scale_inv = scaling.quantize_blocks(x.t() if columnwise else x, *options)
        if how.compact:
            return (dense(q.t()), dense(scale_inv.t())) if columnwise else (q, scale_inv)
        return ready(q, scale_inv, how, pad_outer)
    matrices = x.mT if columnwise else x
    data, scales = stacked(scaling.quantize_blocks(matrix, *options) for matrix in matrices)
    data = padded(data, pad_outer)
    if how.granularity == Granularity.BLOCK_1X128:
        return data, dense(torch.nn.functional.pad(scales.mT, (0, data.shape[1] - scales.shape[1]))).mT
    return data, scales


def ready(q: torch.Tensor, scale_inv: torch.Tensor, how: CastOptions, pad_outer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy q [outer, inner] and its compact scales as GEMMs read them."""
    q = padded(q, pad_outer)
    return q, gemm_ready_scales(scale_inv, q.shape[0], how.granularity)


def empty(
    x: torch.Tensor, dtype: torch.dtype, how: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of a copy and of its scales."""
    q = x.new_empty(x.shape, dtype=dtype) if how.compact else empty_copy(x, dtype, columnwise, pad_outer)
    return q, empty_scales(x, how.granularity, columnwise, pad_outer, how.compact)


def compact_shape(how: CastOptions, outer: int, inner: int) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner]."""
    return scaling.scale_shape(outer, inner, how.granularity)


def gemm_ready_scales(scale_inv: torch.Tensor, outer: int, granularity: str) -> torch.Tensor:
    """Compact scales, in the orientation of their copy, as GEMM-ready memory; `outer` is the (padded) outer size."""
    stored = scale_inv.t() if granularity == Granularity.BLOCK_1X128 else scale_inv
    width = round_up(outer if granularity == Granularity.BLOCK_1X128 else stored.shape[1], SCALE_ALIGNMENT)
    out = stored.new_zeros((stored.shape[0], width))
    out[:, : stored.shape[1]] = stored
    return out


def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, granularity: str) -> torch.Tensor:
    """float32 values of a GEMM-ready copy q [outer, inner]."""
    outer, inner = q.shape
    if granularity == Granularity.BLOCK_1X128:
        return scaling.dequantize(q, scale_inv[:, :outer].t(), granularity)
    return scaling.dequantize(q, scale_inv[:, : num_blocks(inner, BLOCK)], granularity)


def multiply(product: Product) -> torch.Tensor:
    """`gemm.scaled_mm` of operands with scales of blocks of 128."""
    of_a, of_b = product.granularities
    out = dequantize(product.a, product.scale_inv_a, of_a) @ dequantize(product.b.t(), product.scale_inv_b, of_b).t()
    return finished(out, product)


GRANULARITIES = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


def check_block(block: Sequence[int]) -> None:
    if not isinstance(block, Sequence) or tuple(block) not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"block is {block!r}; use (1, {BLOCK}) or ({BLOCK}, {BLOCK})")


def check_scales(product: Product) -> None:
    for name, scale_inv, outer, inner, granularity in (
        ("scale_inv_a", product.scale_inv_a, *product.a.shape, product.granularity_a),
        ("scale_inv_b", product.scale_inv_b, *product.b.shape[::-1], product.granularity_b),
    ):
        shape = gemm_ready_scale_shape(outer, inner, granularity)
        checks.check_gemm_ready(name, scale_inv, shape, torch.float32)


def granularity_of_compact(name: str, scale_inv: torch.Tensor, outer: int, inner: int, transposed: bool) -> Granularity:
    """The blocks that compact scales of an operand belong to, told by their shape. The operand is [outer, inner], and with
    `transposed` both it and its scales stand transposed. A square grid looks the same either way; there the scales of a
    transposed operand must be column-major like it, because the scales of `quantize_blockwise` passed without their `.t()`
    would give wrong numbers in silence."""
    shapes = [scaling.scale_shape(outer, inner, granularity) for granularity in GRANULARITIES]
    if transposed:
        shapes = [shape[::-1] for shape in shapes]
    given = tuple(scale_inv.shape)
    for granularity, shape in zip(GRANULARITIES, shapes, strict=True):
        if given == tuple(shape):
            if transposed and given == given[::-1] and given[0] > 1 and scale_inv.stride(0) != 1:
                raise ValueError(
                    f"{name} has the square shape {given} and strides {scale_inv.stride()}, which do not tell whether"
                    " it is transposed; pass the scales that quantize_blockwise returned with .t()"
                )
            return granularity
    fix = "transpose it with .t()" if given[::-1] in shapes else "pass the result of quantize_blockwise for this operand"
    raise ValueError(f"{name} has shape {given}; 1x{BLOCK} scales are {shapes[0]}, {BLOCK}x{BLOCK} ones {shapes[1]}: {fix}")


# -- the trial of a library's GEMM (lowering/trials.py): small products of every kind, held against these

#: M, N, K: 5 blocks of K, which 128x128 scales pad to 8, and 4, which they do not; ragged last blocks.
_WHOLE, _RAGGED = ((256, 384, 640), (128, 256, 512)), ((132, 272, 656), (130, 272, 656))


def kind_of(gemm: Product) -> ProductKind:
    """The kind that a GEMM is of."""
    is_ragged = any(size % BLOCK for size in gemm.sizes)
    dtypes = gemm.a.dtype, gemm.b.dtype
    return ProductKind(gemm.a.device, dtypes, gemm.granularities, gemm.bias_dtype, gemm.out_dtype, is_ragged)


def fault_of_kind(kind: ProductKind, compute: Callable[[Product], torch.Tensor]) -> str | None:
    """The fault of a library's results, or None."""
    granularity_a, granularity_b = kind.granularities

    def made(m: int, n: int, k: int, bias: torch.Tensor | None) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        a, scale_inv_a = _operand(m, k, kind.dtypes[0], granularity_a)
        b, scale_inv_b = _operand(n, k, kind.dtypes[1], granularity_b)
        scaling: dict[str, Any] = {"granularity_a": granularity_a, "granularity_b": granularity_b}
        gemm = Product(a, b.t(), scale_inv_a, scale_inv_b, bias, **scaling, out_dtype=kind.out_dtype)
        expected = multiply(dataclasses.replace(gemm, out_dtype=torch.float32))
        return functools.partial(compute, gemm.on(kind.device)), expected

    return fault_of_sizes(kind, _RAGGED if kind.is_ragged else _WHOLE, made)


def _operand(outer: int, inner: int, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values whose blocks differ in magnitude, quantized. The user's random numbers are left alone."""
    generator = torch.Generator().manual_seed(outer + inner)
    x = torch.randn(outer, inner, generator=generator)
    magnitudes = torch.exp2(torch.randint(-4, 5, (num_blocks(outer, BLOCK), num_blocks(inner, BLOCK)), generator=generator))
    x *= magnitudes.repeat_interleave(BLOCK, 0)[:outer].repeat_interleave(BLOCK, 1)[:, :inner]
    return copy(x, dtype, CastOptions.of(granularity=granularity), False, False)
