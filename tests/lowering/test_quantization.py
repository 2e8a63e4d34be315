"""Common properties of quantization with scales of rows and of blocks: an oracle, shapes, zeros, infinity, bounds of scales."""

import math

import numpy as np
import pytest
import torch

import lowering
from lowering.formats import E4M3, E5M2, FLOAT32_MAX
from lowering.mxfp8.reference import unswizzled
from tests.lowering.test_blockwise import same_bits, wide_range
from tests.support.cases import each
from tests.support.copies import one_copy
from tests.support.fp8 import VALUES, codes_of

ops = torch.ops.lowering

#: Kind of scales -> rows and columns that share one; None is all of them.
KINDS: dict[str, tuple[int, int | None]] = {"rows": (1, None), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}


def quantized(kind: str, x: torch.Tensor, dtype: torch.dtype = E4M3, **options) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "rows":
        return lowering.quantize_rowwise(x, dtype, **options)
    if kind == "1x32":
        return lowering.quantize_mxfp8(x, dtype, **options)
    return lowering.quantize_blockwise(x, dtype, KINDS[kind], **options)


def oracle(x: torch.Tensor, dtype: torch.dtype, height: int, width: int, power_of_2: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale_inv of a finite matrix, one block at a time."""
    values = x.numpy()
    q = np.zeros(values.shape, np.uint8)
    scale_inv = np.zeros([-(-size // block) for size, block in zip(values.shape, (height, width), strict=True)], np.float32)
    for i, j in np.ndindex(scale_inv.shape):
        where = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        amax = np.abs(values[where]).max()
        scale = np.float32(VALUES[dtype][-1]) / amax if amax else np.float32(1)
        if power_of_2:
            scale = np.float32(2.0 ** (np.frexp(scale)[1] - 1))
        q[where] = codes_of((values[where] * scale).astype(np.float64), dtype)
        scale_inv[i, j] = np.float32(1) / scale
    return q, scale_inv


@each("shape", [(1, 130), (129, 257), (100, 150), (128, 128), (3, 5), (5, 1)])
@each("kind", ["rows", "1x128", "128x128"])
@each("power_of_2", [True, False])
@each("dtype", [E4M3, E5M2])
def test_against_an_independent_oracle(shape, kind, power_of_2, dtype):
    x, (height, width) = wide_range(*shape), KINDS[kind]
    x[shape[0] // 2] = 0 if shape[0] > 1 else 1
    for oriented in (x, x.t()):
        q, scale_inv = quantized(kind, oriented, dtype, power_of_2=power_of_2)
        q_expected, expected = oracle(oriented, dtype, height, width or oriented.shape[1], power_of_2)
        assert np.array_equal(q.view(torch.uint8).numpy(), q_expected)
        assert same_bits(scale_inv, torch.from_numpy(expected))


@each("kind", KINDS)
@each("shape", [(130,), (2, 3, 150), (0, 5), (4, 0), (2, 0, 3)])
def test_any_shape_is_flattened_to_rows(kind, shape):
    x, (height, width) = wide_range(*shape), KINDS[kind]
    q, scales = quantized(kind, x)
    rows = math.prod(shape[:-1])
    assert q.shape == x.shape
    assert q.is_contiguous()
    assert scales.shape == (-(-rows // height), 1 if width is None else -(-shape[-1] // width))
    assert scales.is_contiguous()
    for got, want in zip((q, scales), quantized(kind, x.reshape(rows, shape[-1])), strict=True):
        assert same_bits(got.reshape(want.shape), want)


def cast(kind: str, xs: list[torch.Tensor], dtype: torch.dtype, **options) -> list[torch.Tensor]:
    """Copies as GEMMs take them, each with its scales."""
    if kind == "rows":
        return ops.cast_with_scales(xs, dtype, power_of_2=False, **options, granularity="row_wise")
    if kind in ("1x32", "32x32"):
        return ops.cast_with_scales(xs, dtype, square=kind == "32x32", **options, granularity="block_1x32")
    return ops.cast_with_scales(xs, dtype, granularity=f"block_{kind}", power_of_2=False, **options)


def same_scales(kind: str, found: torch.Tensor, compact: torch.Tensor, outer: int, inner: int) -> bool:
    """True for the compact scales in the layout of GEMMs: NOTE [scale layouts] in each reference, written out again."""
    if kind in ("1x32", "32x32"):
        lines = torch.arange(compact.shape[0]) if kind == "1x32" else torch.arange(outer) // 32
        return torch.equal(unswizzled(found, outer, inner), compact[lines])
    if kind == "rows":
        return same_bits(found, torch.cat([compact, torch.ones(found.shape[0] - len(compact), 1)]))
    stored = compact.t() if kind == "1x128" else compact
    width = found.shape[1] if kind == "1x128" else stored.shape[1]
    return same_bits(found, torch.nn.functional.pad(stored, (0, -(-width // 4) * 4 - stored.shape[1])))


@each("shape", [(1, 130), (129, 257), (100, 150), (64, 128), (3, 5), (1, 1), (0, 5), (4, 0)])
@each("kind", ["rows", "1x128", "128x128", "1x32", "32x32"])
@each("pad", [False, True])
def test_all_ways_to_cast_give_the_padded_quantization(shape, kind, pad):
    """Both copies, one, those of several matrices, and the compact format made GEMM-ready: the same bits, padded with zeros."""
    x, dtype = wide_range(*shape, dtype=(torch.float32, torch.bfloat16)[pad]), (E4M3, E5M2)[pad]
    pads = {"pad_rows": pad, "pad_cols": pad}
    both = cast(kind, [x], dtype, columnwise=True, **pads)
    many = cast(kind, [x, wide_range(3, 7).to(x.dtype), x], dtype, columnwise=True, **pads)
    for columnwise, oriented in ((False, x), (True, x.t())):
        q, scales = both[2 * columnwise : 2 * columnwise + 2]
        outer, inner = oriented.shape
        how = {"square": True} if kind == "32x32" else {} if kind == "1x32" else {"power_of_2": False}
        values, compact = quantized(kind.replace("32x32", "1x32"), oriented, dtype, **how)
        step = 32 if "32" in kind else 16
        assert q.shape == (outer + (-outer % 16 if pad else 0), inner + -inner % step)
        assert same_bits(q[:outer, :inner], values)
        assert not q.view(torch.uint8)[outer:].any()
        assert not q.view(torch.uint8)[:, inner:].any()
        assert scales.is_contiguous()
        assert same_scales(kind, scales, compact, outer, inner)
        side = one_copy(columnwise=columnwise, pad_outer=pad)
        ways = [cast(kind, [x], dtype, **side), many[6 * columnwise :: 3][:2], many[6 * columnwise + 2 :: 3][:2]]
        two = cast(kind, [x, x], dtype, **side)
        ways += [two[::2], two[1::2]]
        if kind != "rows":
            packed = cast(kind, [x], dtype, compact=True, rowwise=not columnwise, columnwise=columnwise)
            if "32" in kind:
                ready = ops.gemm_ready(
                    *packed, square=kind == "32x32", columnwise=columnwise, pad_outer=pad, granularity="block_1x32"
                )
            else:
                ready = ops.gemm_ready(*packed, granularity=f"block_{kind}", columnwise=columnwise, pad_outer=pad)
            ways.append(ready)
        for way in ways:
            assert same_bits(way[0], q)
            assert torch.equal(way[1], scales)


@each("value", [0.0, float("inf"), float("-inf"), float("nan")])
@each("dtype", [E4M3, E5M2])
@each("kind", ["rows", "1x128", "128x128"])
def test_what_is_zero_or_not_finite_has_scale_one_and_stays_visible(value, dtype, kind):
    x = torch.ones(130, 260)
    x[: KINDS[kind][0] if kind == "128x128" else 128, : KINDS[kind][1]] = 0
    x[5, 7] = value
    q, scale_inv = quantized(kind, x, dtype)
    assert scale_inv[0 if kind == "128x128" else 5, 0] == 1
    assert scale_inv[-1, -1] != 1
    got = q[5, 7].float().item()
    if math.isinf(value) and dtype == E5M2:
        assert got == value
    elif value != 0:
        assert math.isnan(got)
    finite = torch.ones_like(x, dtype=torch.bool)
    finite[5, 7] = False
    assert q.float()[finite].isfinite().all()


@pytest.mark.parametrize("kind", ["rows", "1x128"])
def test_epsilon_bounds_the_scale_and_applies_to_zeros(kind):
    x = torch.zeros(2, 128)
    x[0, 3] = 1e-3
    _, scale_inv = quantized(kind, x, power_of_2=False, epsilon=0.5)
    assert torch.equal(scale_inv, (torch.tensor(448.0) / 0.5).reciprocal().expand(2, 1))


@each(
    ("kind", "dtype", "largest"),
    [
        ("rows", torch.float32, FLOAT32_MAX),
        ("1x128", torch.float32, FLOAT32_MAX),
        ("1x128", torch.bfloat16, torch.finfo(torch.bfloat16).max),
    ],
)
def test_an_infinite_scale_becomes_the_largest_number(kind, dtype, largest):
    """The largest number is that of the input's dtype for blocks."""
    for power_of_2, scale in ((False, largest), (True, 2.0**127)):
        _, scale_inv = quantized(kind, torch.full((1, 128), 1e-38, dtype=dtype), power_of_2=power_of_2)
        assert torch.equal(scale_inv, torch.full((1, 1), scale).reciprocal())
