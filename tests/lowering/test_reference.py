"""The references of tensorwise/ and state.py: golden data bit for bit, and oracles written here in float64 and plain Python."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lowering import state as state_reference
from lowering.formats import E4M3, E5M2, FLOAT32_MAX, FP8_MAX
from lowering.state import update_scales_on_cpu
from lowering.tensorwise import reference
from tests.support.cases import each
from tests.support.fp8 import bits, codes_of, every_bfloat16

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def oracle(x: np.ndarray, scale: float, dtype: torch.dtype) -> np.ndarray:
    """FP8 codes of float32 x times float32 scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = (x * np.float32(scale)).astype(np.float64)
    infinity = {E4M3: 0x7F, E5M2: 0x7C}[dtype] | np.signbit(x) * 0x80
    return np.where(np.isinf(x), infinity, codes_of(product, dtype)).astype(np.uint8)


def assert_codes(actual: torch.Tensor, expected: np.ndarray) -> None:
    """Equal codes; NaN of any sign and payload is NaN."""
    codes = torch.from_numpy(np.array(expected))
    nan = codes.view(actual.dtype).float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    assert torch.equal(bits(actual).masked_fill(nan, 0), codes.masked_fill(nan, 0))


CURRENT = np.load(GOLDEN / "current.npz")


@each("case", json.loads(bytes(CURRENT["index"])))
def test_current_scaling_equals_golden_data(case):
    key, dtype = case["key"], FORMATS[case["format"]]
    x = torch.from_numpy(CURRENT[f"{key}_x"]).to(DTYPES[case["input_dtype"]])
    amax = reference.amax(x)
    scale = reference.scale_from_amax(amax, dtype, epsilon=case["amax_epsilon"], power_of_2=case["pow2"])
    for name, value in (("amax", amax), ("scale", scale), ("scale_inv", scale.reciprocal())):
        np.testing.assert_array_equal(value.numpy(), CURRENT[f"{key}_{name}"], err_msg=name)
    assert_codes(reference.quantize(x, scale, dtype), CURRENT[f"{key}_q"])


UPDATES = each("update_scales", [state_reference.update_scales, update_scales_on_cpu])


@UPDATES
@each("case", json.loads((GOLDEN / "delayed.json").read_text()))
def test_delayed_scaling_equals_golden_data(case, update_scales):
    history, scale = torch.zeros(case["amax_history_len"], 1), torch.ones(1)
    limit = torch.tensor([FP8_MAX[FORMATS[case["format"]]]])
    for step in case["steps"]:
        history[0] = step["amax"]
        update_scales(history, scale, limit, algo=case["amax_compute_algo"], margin=case["margin"])
        assert torch.equal(history[:, 0], torch.tensor(step["history_after"]))
        assert torch.equal(scale, torch.tensor([step["scale_after"]]))


@each("dtype", [E4M3, E5M2])
@each("scale", [1.0, 3.7, 2.0**-7, 1e30, FLOAT32_MAX])
def test_every_bfloat16_value_is_cast_as_the_oracle_says(dtype, scale):
    x = every_bfloat16()
    assert_codes(reference.quantize(x, torch.tensor(scale), dtype), oracle(x.float().numpy(), scale, dtype))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.floats(min_value=2.0**-60, max_value=2.0**60, width=32),
    st.sampled_from([E4M3, E5M2]),
)
def test_any_float32_value_is_cast_as_the_oracle_says(values, scale, dtype):
    x = torch.tensor(values, dtype=torch.float32)
    assert_codes(reference.quantize(x, torch.tensor(scale), dtype), oracle(x.numpy(), scale, dtype))


INF, NAN = math.inf, math.nan


@each(("values", "expected"), [([], 0.0), ([0.0, -0.0], 0.0), ([1.0, -3.0], 3.0), ([-INF, 1.0], INF), ([INF, NAN], NAN)])
@each("dtype", DTYPES.values())
def test_amax(values, expected, dtype):
    result = reference.amax(torch.tensor(values, dtype=dtype))
    torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


@each(
    ("amax", "options", "expected"),
    [
        (0.0, {}, 1.0),
        (INF, {}, 1.0),
        (NAN, {}, 1.0),
        (0.0, {"epsilon": 2.0}, 224.0),
        (NAN, {"epsilon": 2.0}, 1.0),
        (1e-44, {}, FLOAT32_MAX),
        (1e-44, {"power_of_2": True}, 2.0**127),
        (3.0, {"margin": 2}, float(np.float32(112) / np.float32(3))),
        (3.0, {"power_of_2": True}, 128.0),
        (448.0, {"power_of_2": True}, 1.0),
    ],
)
def test_scale_from_amax(amax, options, expected):
    assert reference.scale_from_amax(torch.tensor(amax), E4M3, **options).item() == expected


@each("shape", [(33, 50), (1, 130), (16, 32), (0, 5), (5, 0)])
@each("pad_rows", [False, True])
@each("pad_cols", [False, True])
def test_layouts_and_padding(shape, pad_rows, pad_cols):
    x, scale = torch.randn(shape), torch.tensor(3.0)
    rowwise, columnwise, amax = reference.cast(
        [x], [scale], E4M3, pad_rows=pad_rows, pad_cols=pad_cols, columnwise=True, with_amax=True
    )
    (rows, cols), (rows16, cols16) = shape, (-(-size // 16) * 16 for size in shape)
    assert rowwise.shape == (rows16 if pad_rows else rows, cols16)
    assert columnwise.shape == (cols16 if pad_cols else cols, rows16)
    assert rowwise.is_contiguous()
    assert columnwise.is_contiguous()
    assert torch.equal(amax, reference.amax(x))
    for copy, (inner_rows, inner_cols), source in ((rowwise, shape, x), (columnwise, shape[::-1], x.t())):
        expected = torch.zeros(copy.shape, dtype=torch.uint8)
        expected[:inner_rows, :inner_cols] = bits(reference.quantize(source.contiguous(), scale, E4M3))
        assert torch.equal(bits(copy), expected)


def python_boundary(history, scale, limit, algo, margin):
    """One tensor's boundary as numerics.md writes it, on a list of floats. Returns the history, scale and the count."""
    a = history[0]
    if a == 0 or not math.isfinite(a):
        return [0.0, *history[1:]], scale, int(not math.isfinite(a))
    window = [*history[1:], a]
    amax = max(window) if algo == "max" else a
    if amax != 0:
        with np.errstate(over="ignore"):
            scale = float(np.float32(limit / 2.0**margin) / np.float32(amax))
        scale = min(scale, FLOAT32_MAX)
    return [0.0, *history[2:], a] if len(history) > 1 else [0.0], scale, 0


@UPDATES
@each("length", [1, 2, 3, 65, 66, 67, 200])
@each("algo", ["max", "most_recent"])
@each("all_valid", [True, False])
def test_boundary_of_many_tensors(length, algo, all_valid, update_scales):
    count = 7
    storage = torch.rand(length, count + 2)
    history, beyond = storage[:, :count], storage[:, count:].clone()
    if not all_valid:
        history[0, :4] = torch.tensor([0.0, torch.inf, torch.nan, 1e-44])
    scale, limits = torch.rand(count) + 1, torch.tensor([448.0, 57344.0]).repeat(4)[:count]
    counts = torch.full((count,), 5, dtype=torch.int32)
    expected = [python_boundary(history[:, i].tolist(), scale[i].item(), limits[i].item(), algo, 1) for i in range(count)]
    update_scales(history, scale, limits, num_non_finite=counts, algo=algo, margin=1)
    assert torch.equal(history, torch.tensor([column for column, _, _ in expected]).t())
    assert torch.equal(scale, torch.tensor([value for _, value, _ in expected]))
    assert counts.tolist() == [5 + non_finite for _, _, non_finite in expected]
    assert torch.equal(storage[:, count:], beyond)


@each("length", [1, 2, 70])
@each("algo", ["max", "most_recent"])
def test_a_boundary_in_pieces_equals_the_whole(length, algo):
    """A caller's own algorithm goes through `rolled_history` and `update_from_amax`; with the stock one nothing changes."""
    history = torch.rand(length, 5)
    history[0] = torch.tensor([0.0, torch.inf, torch.nan, 0.5, 2.0])
    scale, limits, counts = torch.ones(5), torch.full((5,), 448.0), torch.zeros(5, dtype=torch.int32)
    whole = [tensor.clone() for tensor in (history, scale, counts)]
    update_scales_on_cpu(whole[0], whole[1], limits, num_non_finite=whole[2], algo=algo, margin=2)
    staged = history[0].clone()
    rolled, window = state_reference.rolled_history(history)
    amax = window.amax(dim=0) if algo == "max" else staged
    state_reference.update_from_amax(history, rolled, scale, staged, amax, state_reference.scale_of(amax, limits, 2), counts)
    for actual, expected in zip((history, scale, counts), whole, strict=True):
        assert torch.equal(actual, expected)


def test_record_amax_takes_the_largest_and_keeps_nan():
    amax = torch.tensor([1.0, 5.0, 2.0, 0.0])
    slots = torch.tensor([3, 0, 1, 2])
    observed = [torch.tensor(v) for v in (4.0, 0.5, math.nan, 1.0, 7.0)]
    state_reference.record_amax(amax, slots, observed, [0, 1, 2, 3, 0])
    torch.testing.assert_close(amax, torch.tensor([1.0, math.nan, 2.0, 7.0]), rtol=0, atol=0, equal_nan=True)
    before = amax.clone()
    state_reference.record_amax(amax, slots, [], [])
    torch.testing.assert_close(amax, before, rtol=0, atol=0, equal_nan=True)


def test_load_scales_returns_values_not_views():
    scale = torch.tensor([3.0, 7.0, 0.1])
    taken, inverse = state_reference.load_scales(scale, torch.tensor([2, 0, 1]), 2)
    scale.zero_()
    assert taken.tolist() == torch.tensor([0.1, 3.0]).tolist()
    assert inverse.tolist() == (1 / np.array([0.1, 3.0], dtype=np.float32)).tolist()
