"""Blockwise quantization: golden data, layouts, edges and rejections."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import lowering
from lowering.blockwise import reference
from lowering.formats import E4M3, E5M2, Granularity
from tests.support.cases import each

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "blockwise.npz")
CASES = json.loads(bytes(GOLDEN["index"]))
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
INPUTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = [(1, 130), (129, 257), (100, 150), (128, 128), (3, 5)]
ONE, TWO = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    assert actual.dtype == expected.dtype
    integers = torch.uint8 if actual.element_size() == 1 else torch.int32
    return torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))


def wide_range(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return values.to(dtype)


@each("case", CASES)
def test_golden(case):
    key = case["key"]
    x = torch.from_numpy(GOLDEN[f"{key}_x"]).to(INPUTS[case["input_dtype"]])
    for oriented, q_name, scale_name in ((x, "q", "scale_inv"), (x.t(), "qt", "scale_inv_t")):
        q, scale_inv = lowering.quantize_blockwise(
            oriented, FORMATS[case["format"]], tuple(case["block"]), power_of_2=case["pow2"]
        )
        assert np.array_equal(q.view(torch.uint8).numpy(), GOLDEN[f"{key}_{q_name}"])
        assert same_bits(scale_inv, torch.from_numpy(GOLDEN[f"{key}_{scale_name}"]))


def test_a_large_weight_has_the_scales_of_its_blocks():
    x = torch.randn(4096, 11008, dtype=torch.bfloat16)
    q, scale_inv = lowering.quantize_blockwise(x, E4M3, (128, 128))
    amax = torch.nn.functional.max_pool2d(x.abs().float()[None], 128)[0]
    assert torch.equal(scale_inv, torch.exp2(torch.ceil(torch.log2(amax / 448))))
    assert q.shape == x.shape


@each("shape", [*SHAPES, (0, 5), (4, 0)])
@each("granularity", [ONE, TWO])
@each("pad_outer", [False, True])
@each("columnwise", [False, True])
def test_a_gemm_ready_copy_is_the_padded_compact_one(shape, granularity, pad_outer, columnwise):
    x = wide_range(*shape)
    q, scale_inv = lowering.cast_blockwise(
        x, E4M3, granularity=granularity, columnwise=columnwise, pad_outer=pad_outer, power_of_2=False
    )
    oriented = x.t() if columnwise else x
    q_expected, compact = lowering.quantize_blockwise(oriented, E4M3, granularity.block, power_of_2=False)
    outer, inner = oriented.shape
    padded_outer = -(-outer // 16) * 16 if pad_outer else outer
    assert q.shape == (padded_outer, -(-inner // 16) * 16)
    assert same_bits(q[:outer, :inner], q_expected)
    assert not q.view(torch.uint8)[outer:].any()
    assert not q.view(torch.uint8)[:, inner:].any()

    stored = compact.t() if granularity is ONE else compact
    width = padded_outer if granularity is ONE else compact.shape[1]
    assert scale_inv.is_contiguous()
    assert scale_inv.shape == (stored.shape[0], -(-width // 4) * 4)
    assert same_bits(scale_inv[:, : stored.shape[1]], stored)
    assert not scale_inv[:, stored.shape[1] :].any()


@pytest.mark.parametrize("shape", [*SHAPES, (0, 5)])
@pytest.mark.parametrize("granularity", [ONE, TWO])
def test_both_orientations_and_the_compact_format_give_the_same_bits(shape, granularity):
    x = wide_range(*shape, dtype=torch.bfloat16)
    both = lowering.cast_transpose_blockwise(x, E4M3, granularity=granularity, pad_rows=True)
    single = [
        *lowering.cast_blockwise(x, E4M3, granularity=granularity, pad_outer=True),
        *lowering.cast_blockwise(x, E4M3, granularity=granularity, columnwise=True),
    ]
    q, scale_inv, q_columnwise, scale_inv_columnwise = lowering.compact_blockwise(x, E4M3, granularity=granularity)
    a, b = shape
    blocks_a, blocks_b = -(-a // 128), -(-b // 128)
    assert q.shape == q_columnwise.shape == (a, b)
    assert scale_inv.shape == ((a, blocks_b) if granularity is ONE else (blocks_a, blocks_b))
    assert scale_inv_columnwise.shape == ((blocks_a, b) if granularity is ONE else (blocks_a, blocks_b))
    converted = [
        *lowering.gemm_ready_blockwise(q, scale_inv, granularity=granularity, pad_outer=True),
        *lowering.gemm_ready_blockwise(q_columnwise, scale_inv_columnwise, granularity=granularity, columnwise=True),
    ]
    for tensors in (both, converted):
        assert all(same_bits(actual, expected) for actual, expected in zip(tensors, single, strict=True))


def test_rows_gathered_in_the_compact_format_quantize_like_the_whole():
    x = wide_range(256, 150)
    shards = [lowering.compact_blockwise(shard, E4M3, granularity=ONE) for shard in x.chunk(2)]
    gathered = [torch.cat(parts) for parts in zip(*shards, strict=True)]
    for columnwise in (False, True):
        pair = gathered[2:] if columnwise else gathered[:2]
        actual = lowering.gemm_ready_blockwise(*pair, granularity=ONE, columnwise=columnwise)
        expected = lowering.cast_blockwise(x, E4M3, granularity=ONE, columnwise=columnwise)
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("granularity", [ONE, ONE.value])
def test_shape_functions_are_symbolic(granularity):
    def both(x):
        return lowering.cast_transpose_blockwise(x, E4M3, granularity=granularity, pad_rows=True)

    compiled = torch.compile(both, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (20, 33):
        x = wide_range(rows, 150)
        assert all(same_bits(a, e) for a, e in zip(compiled(x), both(x), strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("block", [(128, 1), (1, 64), (128,), (64, 64), 128])
def test_other_blocks_are_rejected(block):
    with pytest.raises(ValueError, match=r"block is \(?\d+.*use \(1, 128\) or \(128, 128\)"):
        lowering.quantize_blockwise(torch.ones(4, 128), E4M3, block)


def test_rejections_name_the_value_and_the_fix():
    x = torch.ones(4, 128)
    with pytest.raises(ValueError, match=r"float64.*convert it to"):
        lowering.quantize_blockwise(x.double(), E4M3, (1, 128))
    with pytest.raises(ValueError, match="not an FP8 dtype"):
        lowering.quantize_blockwise(x, torch.float16, (1, 128))
    with pytest.raises(ValueError, match=r"no dimensions.*reshape"):
        lowering.quantize_blockwise(torch.ones(()), E4M3, (1, 128))
    with pytest.raises(ValueError, match=r"granularity is 'tensor_wise'; use 'block_1x128' or 'block_128x128'"):
        lowering.cast_blockwise(x, E4M3, granularity=Granularity.TENSOR_WISE)
    with pytest.raises(ValueError, match=r"\(2, 2, 128\); flatten"):
        lowering.cast_transpose_blockwise(torch.ones(2, 2, 128), E4M3, granularity=ONE)
    q, scale_inv, *_ = lowering.compact_blockwise(x, E4M3, granularity=ONE)
    with pytest.raises(ValueError, match=r"compact scales of this copy are float32 \(1, 128\)"):
        lowering.gemm_ready_blockwise(q, scale_inv, granularity=ONE, columnwise=True)


def test_padding_of_scales_is_written(monkeypatch):
    def poisoned(*args, **kwargs):
        raise AssertionError("uninitialised memory in the reference")

    monkeypatch.setattr(reference.torch, "empty", poisoned)
    lowering.cast_blockwise(torch.ones(5, 130), E4M3, granularity=ONE, pad_outer=True)
