"""lowering.formats: the numbers of the two FP8 formats, decoded bit by bit."""

import itertools

import pytest
import torch

from lowering import formats
from lowering.formats import Granularity
from tests.support.cases import each
from tests.support.fp8 import VALUES


def test_largest_finite_values():
    for dtype, largest in formats.FP8_MAX.items():
        assert formats.fp8_max(dtype) == largest == VALUES[dtype][-1] == torch.finfo(dtype).max
    for dtype in (torch.float32, torch.uint8, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        with pytest.raises(ValueError, match=r"float8_e4m3fn, torch\.float8_e5m2"):
            formats.fp8_max(dtype)
    assert torch.float64 not in formats.HIGH_PRECISION_DTYPES
    for dtype in formats.HIGH_PRECISION_DTYPES:
        largest = torch.tensor(formats.largest_finite(dtype), dtype=dtype)
        assert torch.isfinite(largest)
        assert torch.isinf(torch.nextafter(largest, torch.tensor(torch.inf, dtype=dtype)))


def test_values_of_the_oracle_are_those_of_torch():
    for dtype, values in VALUES.items():
        assert values.tolist() == torch.arange(len(values), dtype=torch.uint8).view(dtype).double().tolist()
        assert not torch.tensor([len(values)], dtype=torch.uint8).view(dtype).float().isfinite().item()


@each(("size", "padded"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32), (50257, 50272)])
def test_alignment(size, padded):
    assert formats.pad_to_alignment(size) == padded
    assert formats.pad_to_alignment(padded) == padded


def test_the_finest_of_the_granularities_that_meet():
    """As strings "block_128x128" comes before "block_1x128"."""
    for first, second in itertools.permutations((Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)):
        assert Granularity.finest([first, second]) is Granularity.BLOCK_1X128
    assert Granularity.finest([Granularity.TENSOR_WISE, Granularity.ROW_WISE]) is Granularity.ROW_WISE
    assert all(Granularity.finest(iter([g, g])) is g for g in Granularity)


@each("granularity", Granularity)
def test_names_and_blocks_of_granularities(granularity):
    torchs = {name.lower().replace("blockwise", "block") for name in torch.nn.functional.ScalingType.__members__}
    assert granularity.value.replace("_", "") in torchs
    assert (granularity.block is not None) == granularity.value.startswith("block")
    if granularity.block is not None:
        rows, cols = granularity.block
        assert granularity == f"block_{rows}x{cols}"
        assert Granularity.of_block((rows, cols)) is granularity
        assert granularity.is_square == (rows == cols)
    with pytest.raises(ValueError, match=r"no granularity has blocks of \(128, 1\); use one of \(1, 32\)"):
        Granularity.of_block((128, 1))
