"""Quantization with scales of rows and of blocks: oracles, golden data and torchao, layouts, edges, bounds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import lowering
from lowering.formats import E4M3, E5M2, FLOAT32_MAX
from lowering.mxfp8 import reference as mxfp8
from tests.support.cases import each
from tests.support.copies import one_copy
from tests.support.fp8 import VALUES, codes_of, same_bits, wide_range

ops = torch.ops.lowering
GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "blockwise.npz")
FP8 = [E4M3, E5M2]

#: Kind of scales -> rows and columns that share one; None is all of them.
KINDS: dict[str, tuple[int, int | None]] = {"rows": (1, None), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
SQUARES = {**KINDS, "32x32": (32, 32)}


def quantized(kind: str, x: torch.Tensor, dtype: torch.dtype = E4M3, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Of blocks of 32 without options: their scales are powers of two."""
    if kind == "rows":
        return lowering.quantize_rowwise(x, dtype, **options)
    if kind in ("1x32", "32x32"):
        return lowering.quantize_mxfp8(x, dtype, square=kind == "32x32")
    return lowering.quantize_blockwise(x, dtype, KINDS[kind], **options)


def cast(kind: str, xs: list[torch.Tensor], dtype: torch.dtype, **options) -> list[torch.Tensor]:
    """Copies as GEMMs take them, each with its scales."""
    how = {"square": kind == "32x32"} if "32" in kind else {"power_of_2": False}
    name = {"rows": "row_wise", "32x32": "block_1x32"}.get(kind, f"block_{kind}")
    return ops.cast_with_scales(xs, dtype, granularity=name, **how, **options)


# -- values and scales


def oracle(x: torch.Tensor, dtype: torch.dtype, kind: str, power_of_2: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale_inv of a finite matrix, one block at a time; of blocks of 32 the exponents, biased by 127."""
    values, (height, width) = x.numpy(), SQUARES[kind]
    width, most = width or x.shape[1], np.float32(VALUES[dtype][-1])
    q = np.zeros(values.shape, np.uint8)
    shape = [-(-size // block) for size, block in zip(values.shape, (height, width), strict=True)]
    scales = np.zeros(shape, np.uint8 if "32" in kind else np.float32)
    for i, j in np.ndindex(scales.shape):
        where = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        amax = np.abs(values[where]).max()
        if "32" in kind:
            mantissa, exponent = np.frexp(amax / most)
            scales[i, j] = 127 + exponent - (mantissa == 0.5) if amax else 0
            scale = np.float32(2.0 ** (127 - float(scales[i, j]))) if amax else np.float32(1)
        else:
            scale = most / amax if amax else np.float32(1)
            scale = np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_of_2 else scale
            scales[i, j] = np.float32(1) / scale
        q[where] = codes_of((values[where] * scale).astype(np.float64), dtype)
    return q, scales


@each("shape", [(1, 130), (129, 257), (128, 128), (5, 1)])
@each("kind", SQUARES)
@each("power_of_2", [True, False])
@each("dtype", FP8)
def test_against_an_independent_oracle(shape, kind, power_of_2, dtype):
    x = wide_range(*shape)
    x[shape[0] // 2] = 0 if shape[0] > 1 else 1
    for oriented in (x, x.t()):
        q, scales = quantized(kind, oriented, dtype, power_of_2=power_of_2)
        q_expected, expected = oracle(oriented, dtype, kind, power_of_2)
        assert np.array_equal(q.view(torch.uint8).numpy(), q_expected)
        assert same_bits(scales, torch.from_numpy(expected))


@each("case", json.loads(bytes(GOLDEN["index"])))
def test_golden(case):
    key, dtype = case["key"], {"e4m3": E4M3, "e5m2": E5M2}[case["format"]]
    x = torch.from_numpy(GOLDEN[f"{key}_x"]).to({"bf16": torch.bfloat16, "fp32": torch.float32}[case["input_dtype"]])
    for oriented, q_name, scale_name in ((x, "q", "scale_inv"), (x.t(), "qt", "scale_inv_t")):
        q, scale_inv = lowering.quantize_blockwise(oriented, dtype, tuple(case["block"]), power_of_2=case["pow2"])
        assert np.array_equal(q.view(torch.uint8).numpy(), GOLDEN[f"{key}_{q_name}"])
        assert same_bits(scale_inv, torch.from_numpy(GOLDEN[f"{key}_{scale_name}"]))


@each("value", [0.0, float("inf"), float("-inf"), float("nan")])
@each("dtype", FP8)
@each("kind", ["rows", "1x128", "128x128"])
def test_what_is_zero_or_not_finite_has_scale_one_and_stays_visible(value, dtype, kind):
    x = torch.ones(130, 260)
    x[:128, : KINDS[kind][1]] = 0
    x[5, 7] = value
    q, scale_inv = quantized(kind, x, dtype)
    assert scale_inv[0 if kind == "128x128" else 5, 0] == 1
    assert scale_inv[-1, -1] != 1
    expected = torch.tensor(value if value == 0 or (math.isinf(value) and dtype == E5M2) else math.nan)
    torch.testing.assert_close(q[5, 7].float(), expected, rtol=0, atol=0, equal_nan=True)
    assert (~q.float().isfinite()).sum() <= 1


def test_bounds_of_scales():
    """epsilon is the least amax, also of zeros; an infinite scale becomes the largest number, of blocks the input dtype's."""
    x = torch.zeros(2, 128)
    x[0, 3] = 1e-3
    for kind in ("rows", "1x128"):
        _, scale_inv = quantized(kind, x, power_of_2=False, epsilon=0.5)
        assert torch.equal(scale_inv, (torch.tensor(448.0) / 0.5).reciprocal().expand(2, 1))
    for kind, dtype in (("rows", torch.float32), ("1x128", torch.float32), ("1x128", torch.bfloat16)):
        for power_of_2, scale in ((False, torch.finfo(dtype).max), (True, 2.0**127)):
            _, scale_inv = quantized(kind, torch.full((1, 128), 1e-38, dtype=dtype), power_of_2=power_of_2)
            assert torch.equal(scale_inv, torch.full((1, 1), scale).reciprocal())
    assert torch.finfo(torch.float32).max == FLOAT32_MAX


# -- codes of MXFP8


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Rows of one block each, with an amax among small values: powers of two and 1.75 times them, and a step below and above;
    zeros, subnormals, the largest number, inf, NaN. [rows, 32]."""
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)
    at_limits = torch.cat([powers * factor for factor in (1.0, 1.75, 1.75 * (1 - 2**-8), 1.75 * (1 + 2**-7))])
    others = torch.tensor([0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max, torch.inf, torch.nan])
    amaxes = torch.cat([at_limits, others.double()]).to(dtype)
    x = (torch.rand(amaxes.numel(), 32).double() * 2 - 1) * amaxes.double()[:, None].nan_to_num(1.0)
    x = x.nan_to_num(1e30, 1e30, -1e30).to(dtype)
    x[:, 7], x[::3, 9] = amaxes, -0.0
    return x


def codes_with_one_nan(q: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all of them: the sign of a NaN is free."""
    return q.view(torch.uint8).masked_fill(q.float().isnan(), 0x7F)


@each("dtype", FP8)
@each("given", [torch.float32, torch.bfloat16])
def test_both_orientations_of_all_edges_are_torchaos(dtype, given):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = edges(given)
    q, codes = lowering.quantize_mxfp8(x, dtype)
    scale, expected = mx.to_mx(x, dtype, 32, mx.ScaleCalculationMode.RCEIL)
    assert torch.equal(codes, scale.view(torch.uint8))
    columns, scale_t = cast("1x32", [x.t().contiguous()], dtype, rowwise=False, columnwise=True)
    for made in (q, columns):
        assert torch.equal(codes_with_one_nan(made), codes_with_one_nan(expected))
    assert torch.equal(mxfp8.unswizzled(scale_t, *x.shape), codes)
    assert {0, 1, 254, 255} <= set(codes.flatten().tolist())


@each("shape", [(1, 1), (128, 4), (300, 9)])
def test_swizzled_scales_are_torchaos(shape):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    made = mxfp8.swizzled(codes)
    assert made.shape == mxfp8.gemm_ready_scale_shape(shape[0], 32 * shape[1])
    assert torch.equal(made.flatten(), utils.to_blocked(codes))
    assert torch.equal(mxfp8.unswizzled(made, shape[0], 32 * shape[1]), codes)


# -- copies


def same_scales(kind: str, found: torch.Tensor, compact: torch.Tensor, outer: int, inner: int) -> bool:
    """True for the compact scales in the layout of GEMMs: NOTE [scale layouts] in each reference, written out again."""
    if "32" in kind:
        lines = torch.arange(compact.shape[0]) if kind == "1x32" else torch.arange(outer) // 32
        return torch.equal(mxfp8.unswizzled(found, outer, inner), compact[lines])
    if kind == "rows":
        return same_bits(found, torch.cat([compact, torch.ones(found.shape[0] - len(compact), 1)]))
    stored = compact.t() if kind == "1x128" else compact
    width = found.shape[1] if kind == "1x128" else stored.shape[1]
    return same_bits(found, torch.nn.functional.pad(stored, (0, -(-width // 4) * 4 - stored.shape[1])))


@each("shape", [(129, 257), (100, 150), (64, 128), (1, 1), (0, 5), (4, 0)])
@each("kind", SQUARES)
@each("pad", [False, True])
def test_all_ways_to_cast_give_the_padded_quantization(shape, kind, pad):
    """Both copies, one, those of several matrices, and the compact format made GEMM-ready: the same bits, padded with zeros."""
    x, dtype = wide_range(*shape, dtype=(torch.float32, torch.bfloat16)[pad]), FP8[pad]
    pads = {"pad_rows": pad, "pad_cols": pad}
    both = cast(kind, [x], dtype, columnwise=True, **pads)
    many = cast(kind, [x, wide_range(3, 7).to(x.dtype), x], dtype, columnwise=True, **pads)
    for columnwise, oriented in ((False, x), (True, x.t())):
        q, scales = both[2 * columnwise : 2 * columnwise + 2]
        outer, inner = oriented.shape
        values, compact = quantized(kind, oriented, dtype, power_of_2=False)
        assert q.shape == (outer + (-outer % 16 if pad else 0), inner + -inner % (32 if "32" in kind else 16))
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
            how = {"square": kind == "32x32", "granularity": "block_1x32"} if "32" in kind else {"granularity": f"block_{kind}"}
            ways.append(ops.gemm_ready(*packed, columnwise=columnwise, pad_outer=pad, **how))
        for way in ways:
            assert same_bits(way[0], q)
            assert torch.equal(way[1], scales)


def test_both_copies_at_once_are_those_of_one():
    x, scale = torch.randn(200, 300), torch.tensor(3.0)
    for kind in ("block_1x128", "block_128x128"):
        made, travel = (
            make(x, E4M3, granularity=kind) for make in (lowering.cast_transpose_blockwise, lowering.compact_blockwise)
        )
        for i, columnwise in enumerate((False, True)):
            side = slice(2 * i, 2 * i + 2)
            wanted = lowering.cast_blockwise(x, E4M3, granularity=kind, columnwise=columnwise)
            arrived = lowering.gemm_ready(*travel[side], granularity=kind, columnwise=columnwise)
            assert all(same_bits(*pair) for found in (made[side], arrived) for pair in zip(found, wanted, strict=True))
    rows, columns, amax = lowering.cast_transpose_amax(x, scale, E4M3)
    q = lowering.quantize(x, scale, E4M3)
    assert same_bits(rows[:, :300], q)
    assert same_bits(columns[:, :200], q.t())
    assert amax == x.abs().max()
