"""Copies made outside of graphs: those that travel, exported ones and rounded operands hold what one cast holds."""

import pytest
import torch

from fp8pass.recipes import Granularity, Quantization, ScaleFrom, as_recipe
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Layout
from fp8pass.schemes.eager import CastKind, bytes_and_scales, compact, compact_values, quantize, quantize_weight, ready, rounded
from lowering.formats import E4M3

RECIPE = as_recipe("current")
SHAPE = (256, 96)
QUANTIZATIONS = {
    "tensor": Quantization(E4M3, Granularity.TENSOR_WISE),
    "state": Quantization(E4M3, Granularity.TENSOR_WISE, scale_from=ScaleFrom.STATE, margin=1),
    "rows": Quantization(E4M3, Granularity.ROW_WISE),
    "shared": Quantization(E4M3, Granularity.ROW_WISE, scale_from=ScaleFrom.SHARED),
    "1x128": Quantization(E4M3, Granularity.BLOCK_1X128, power_of_2=True),
    "128x128": Quantization(E4M3, Granularity.BLOCK_128X128),
    "1x32": Quantization(E4M3, Granularity.BLOCK_1X32),
    "32x32": Quantization(E4M3, Granularity.BLOCK_1X32, square=True),
}
LAYOUTS = [Layout(columnwise, pads) for columnwise in (False, True) for pads in (False, True)]


def matrix(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[-1])


def copy_of(x, quantization, layout=LAYOUTS[0]):
    """Data and scale of the copy that a cast makes, a tensor without a history with its own scale."""
    kind = CastKind(RECIPE, quantization, (layout,), x.dtype, x.device, is_first=True)
    entries = x.shape[0] if x.dim() == 3 else 1
    (made,) = quantize(kind, [x], torch.zeros(entries) if kind.quantization.has_state else None)
    return made.data[0], made.scale_inv[0]


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [name for name, q in QUANTIZATIONS.items() if not q.has_one_scale])
def test_a_copy_that_travelled_is_that_of_a_cast(name, layout):
    x, quantization = matrix(*SHAPE), QUANTIZATIONS[name]
    columnwise = layout.columnwise and not scheme_of(quantization).has_one_copy(quantization)
    data, scales = compact(x, quantization, columnwise=columnwise)
    assert data.shape == x.shape
    for found, expected in zip(ready(data, scales, quantization, layout), copy_of(x, quantization, layout), strict=True):
        assert found.shape == expected.shape
        assert torch.equal(bits(found), bits(expected))
    plain = Layout(columnwise)
    data_of_cast, factors = bytes_and_scales(quantization, plain, *copy_of(x, quantization, plain), SHAPE)
    values = compact_values(data, scales, quantization)
    assert torch.equal(values, data_of_cast.float() * factors)
    assert (values - x).norm() < 0.05 * x.norm()


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_exported_and_rounded_values_are_those_of_a_copy(name):
    x, quantization = matrix(*SHAPE), QUANTIZATIONS[name]
    data, factors = bytes_and_scales(quantization, Layout(False), *copy_of(x, quantization), SHAPE)
    exported, scales = quantize_weight(x, quantization)
    assert torch.equal(bits(exported), bits(data))
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu).float()
    for dim in range(scales.dim()):
        scales = scales.repeat_interleave(-(-SHAPE[dim] // scales.shape[dim]), dim).narrow(dim, 0, SHAPE[dim])
    assert torch.equal(scales.expand(SHAPE), factors)
    assert torch.equal(rounded(x, RECIPE, quantization, "weight"), data.float() * factors)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_batch_of_inputs_has_one_scale_where_a_tensor_has(name):
    """Four matrices of magnitudes 1 to 1e6: of inputs nothing is left of the first one, which weights keep."""
    x = matrix(4, 32, 64) * torch.tensor([1.0, 1e2, 1e4, 1e6])[:, None, None]
    quantization = QUANTIZATIONS[name]
    first = {kind: rounded(x, RECIPE, quantization, kind)[0] for kind in ("input", "weight")}
    errors = {kind: (value - x[0]).norm() / x[0].norm() for kind, value in first.items()}
    assert errors["weight"] < 0.05
    assert (errors["input"] > 0.5) == quantization.has_one_scale
