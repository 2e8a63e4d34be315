"""The lowerings of scales and of the state's two ends on the CPU's Inductor: bit for bit what `reference` computes."""

from __future__ import annotations

import pytest
import torch

from lowering.formats import E4M3, E5M2
from lowering.inductor import register_lowerings
from lowering.state import reference as state_reference
from lowering.tensorwise import reference

ops = torch.ops.lowering

AMAXES = [0.0, 1.0, 0.3, 448.0, 1e-38, 1e-45, 3.4e38, torch.inf, torch.nan, 5.5e-37]


@pytest.fixture(autouse=True)
def _lowerings():
    register_lowerings()


@pytest.mark.parametrize("power_of_2", [False, True])
def test_scales(power_of_2):
    amaxes = torch.cat([torch.tensor(AMAXES), torch.rand(1000) * 100])
    options = {"margin": 1, "epsilon": 1e-30, "power_of_2": power_of_2}

    @torch.compile(dynamic=False)
    def compiled(amax):
        amax = amax * 1
        alone = ops.scale_from_amax(amax, E5M2, **options)
        return alone, *ops.scales_from_amax(amax, E4M3, **options), *ops.scales_from_amax(amax[2], E4M3, **options)

    scale = reference.scale_from_amax(amaxes, E4M3, **options)
    alone = reference.scale_from_amax(amaxes, E5M2, **options)
    expected = alone, scale, scale.reciprocal(), scale[2], scale[2].reciprocal()
    for result, wanted in zip(compiled(amaxes), expected, strict=True):
        assert torch.equal(result, wanted)


def test_scales_of_an_amax_from_a_hand_written_kernel():
    x = torch.randn(40, 30)

    @torch.compile(dynamic=False)
    def compiled(x):
        return ops.scales_from_amax(ops.amax(x), E4M3)

    scale = reference.scale_from_amax(reference.amax(x), E4M3)
    assert [float(s) for s in compiled(x)] == [float(scale), float(scale.reciprocal())]


@pytest.mark.parametrize("index", [[2, 3, 4], [1, 2, 3, 5, 7, 8, 10], [9], [4, 0, 1]], ids=str)
def test_loaded_scales_and_what_is_taken_of_them(index):
    scale = torch.rand(64) + 0.01
    slots = torch.randperm(64)

    @torch.compile(dynamic=False)
    def compiled(scale, slots):
        loaded = ops.load_scales(scale, slots, 11)
        return *loaded, ops.take(loaded[0], index)

    taken, inverse = state_reference.load_scales(scale, slots, 11)
    for result, wanted in zip(compiled(scale, slots), (taken, inverse, taken[index]), strict=True):
        assert torch.equal(result, wanted)


def test_amaxes_are_recorded_from_their_parts():
    slots = torch.randperm(8)
    x, y = torch.randn(64, 128), torch.randn(10, 24)
    y[3, 3] = torch.nan
    scale = torch.tensor(1.0)

    @torch.compile(dynamic=False)
    def compiled(staging, slots, x, y, scale):
        _, _, tiled = ops.cast_transpose_amax(x * 2, scale, E4M3)
        _, _, given = ops.cast_transpose_amax(x, scale, E4M3)
        _, by_row = ops.cast_amax(y + 1, scale, E4M3)
        ops.record_amax(staging, slots, [tiled, given, by_row], [5, 2, 0])
        return tiled

    staging = torch.full((8,), 3.0)
    expected = staging.clone()
    observed = [reference.amax(x * 2), reference.amax(x), reference.amax(y + 1)]
    state_reference.record_amax(expected, slots, observed, [5, 2, 0])
    assert torch.equal(compiled(staging, slots, x, y, scale), observed[0])
    assert torch.equal(staging.nan_to_num(-1), expected.nan_to_num(-1))


def test_grouped_operations_equal_those_of_one_tensor():
    xs = [torch.randn(16, 48), torch.randn(7, 9).bfloat16(), torch.zeros(0, 4)]
    assert torch.equal(ops.multi_amax(xs), torch.stack([reference.amax(x) for x in xs]))
    assert ops.take(torch.arange(5.0), [3, 1]).tolist() == [3.0, 1.0]


def test_rounding_to_odd_makes_a_detour_through_float16_exact():
    from torch._inductor.lowering import make_pointwise, register_lowering

    from lowering.inductor.elementwise import round_to_odd

    library = torch.library.Library("lowering_test", "FRAGMENT")
    library.define("round_to_odd(Tensor x) -> Tensor")
    library.impl("round_to_odd", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("lowering_test::round_to_odd", torch.empty_like, lib=library)
    op = torch.ops.lowering_test.round_to_odd.default
    register_lowering(op, type_promotion_kind=None)(make_pointwise(round_to_odd))
    rounded = torch.compile(op, dynamic=True)

    for dtype in (E4M3, E5M2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        every = every[every.isfinite()].unique()
        middles = (every[1:] + every[:-1]) / 2
        near = [torch.nextafter(middles, torch.full_like(middles, towards)) for towards in (-torch.inf, torch.inf)]
        x = torch.cat([every, middles, *near, torch.randn(100_000) * 3])
        odd = rounded(x)
        half = odd.to(torch.float16)
        assert torch.equal(half.float(), odd), "exact in float16"
        assert torch.equal(half.to(dtype).view(torch.uint8), x.to(dtype).view(torch.uint8))
