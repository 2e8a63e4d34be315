"""Blockwise quantization: golden data, layouts, edges and rejections."""

import json
from pathlib import Path

import numpy as np
import torch

import lowering
from lowering.blockwise import reference
from lowering.formats import E4M3, E5M2, Granularity
from tests.support.cases import each

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "blockwise.npz")
CASES = json.loads(bytes(GOLDEN["index"]))
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
INPUTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
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


def test_rows_gathered_in_the_compact_format_quantize_like_the_whole():
    x = wide_range(256, 150)
    shards = [lowering.compact_blockwise(shard, E4M3, granularity=ONE) for shard in x.chunk(2)]
    gathered = [torch.cat(parts) for parts in zip(*shards, strict=True)]
    for columnwise in (False, True):
        pair = gathered[2:] if columnwise else gathered[:2]
        actual = lowering.gemm_ready(*pair, granularity=ONE, columnwise=columnwise)
        expected = lowering.cast_blockwise(x, E4M3, granularity=ONE, columnwise=columnwise)
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))


def test_padding_of_scales_is_written(monkeypatch):
    def poisoned(*args, **kwargs):
        raise AssertionError("uninitialised memory in the reference")

    monkeypatch.setattr(reference.torch, "empty", poisoned)
    lowering.cast_blockwise(torch.ones(5, 130), E4M3, granularity=ONE, pad_outer=True)
