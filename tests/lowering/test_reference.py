"""The references of tensorwise/ and state.py: golden data bit for bit, and oracles written here in float64 and plain Python;
the two FP8 formats, and the PTX that converts to them."""

import json
import math
from pathlib import Path

import numpy as np
import torch

from lowering import formats
from lowering import state as state_reference
from lowering.formats import E4M3, E5M2, FLOAT32_MAX, FP8_MAX, PACK, Granularity, ptx_to_fp8
from lowering.state import update_scales_on_cpu
from lowering.tensorwise import reference
from tests.support.cases import each
from tests.support.fp8 import VALUES, bits, codes_of, every_bfloat16
from tests.support.ptx_machine import run_piece

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
INF, NAN = math.inf, math.nan


# -- formats


def test_the_formats():
    for dtype, values in VALUES.items():
        assert values.tolist() == torch.arange(len(values), dtype=torch.uint8).view(dtype).double().tolist()
        assert formats.fp8_max(dtype) == values[-1] == torch.finfo(dtype).max


def test_the_finest_granularity():
    """As strings "block_128x128" comes before "block_1x128", which is finer."""
    assert Granularity.finest([Granularity.BLOCK_128X128, Granularity.BLOCK_1X128]) is Granularity.BLOCK_1X128


def same_but_for_signs_of_nan(found: np.ndarray, expected: torch.Tensor) -> bool:
    nan, codes = expected.float().isnan().numpy(), expected.view(torch.uint8).numpy()
    return bool((found[~nan] == codes[~nan]).all() and (found[nan] == 0x7F).all())


@each("dtype", FORMATS.values())
def test_the_piece_of_ptx_is_torchs_cast_of_every_bfloat16_and_of_what_lies_beside_ties(dtype):
    """Executed after the PTX ISA. NOTE [one piece of PTX] in lowering/formats.py."""
    finite = torch.tensor(VALUES[dtype]).float()
    middles = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(towards)) for towards in (-INF, INF)]
    values = torch.cat([every_bfloat16().float(), finite, middles, *beside])
    for x in (values, -values):
        limited = x.clamp(-FP8_MAX[dtype], FP8_MAX[dtype])  # NaN stays
        assert same_but_for_signs_of_nan(run_piece(ptx_to_fp8(dtype), [x.numpy()], PACK), limited.to(dtype))


# -- casts with one scale


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


@each("dtype", FORMATS.values())
@each("scale", [1.0, 3.7, 2.0**-7, 1e30, FLOAT32_MAX])
def test_every_bfloat16_value_is_cast_as_an_oracle_says(dtype, scale):
    x = every_bfloat16().float().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        product = (x * np.float32(scale)).astype(np.float64)
    infinity = {E4M3: 0x7F, E5M2: 0x7C}[dtype] | np.signbit(x) * 0x80
    expected = np.where(np.isinf(x), infinity, codes_of(product, dtype)).astype(np.uint8)
    assert_codes(reference.quantize(every_bfloat16(), torch.tensor(scale), dtype), expected)


@each(
    ("amax", "options", "expected"),
    [
        (0.0, {}, 1.0),
        (INF, {}, 1.0),
        (0.0, {"epsilon": 2.0}, 224.0),
        (NAN, {"epsilon": 2.0}, 1.0),
        (1e-44, {}, FLOAT32_MAX),
        (1e-44, {"power_of_2": True}, 2.0**127),
        (3.0, {"margin": 2}, float(np.float32(112) / np.float32(3))),
        (3.0, {"power_of_2": True}, 128.0),
    ],
)
def test_scale_from_amax(amax, options, expected):
    assert reference.scale_from_amax(torch.tensor(amax), E4M3, **options).item() == expected


# -- the state of delayed scaling

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


@each("length", [1, 2, 3, 65, 66, 67, 200])
@each("algo", ["max", "most_recent"])
def test_the_boundary_on_the_cpu_is_the_references(length, algo):
    """Where zero, infinity and NaN are staged, and within a larger buffer."""
    storage = torch.rand(length, 9)
    storage[0, :4] = torch.tensor([0.0, torch.inf, torch.nan, 1e-44])
    limits, found = torch.tensor([448.0, 57344.0]).repeat(4)[:7], []
    for update_scales in (state_reference.update_scales, update_scales_on_cpu):
        buffer, scale, counts = storage.clone(), torch.ones(7), torch.full((7,), 5, dtype=torch.int32)
        update_scales(buffer[:, :7], scale, limits, num_non_finite=counts, algo=algo, margin=1)
        assert counts.tolist() == [5, 6, 6, 5, 5, 5, 5]
        found.append((buffer, scale))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert torch.equal(found[0][0][:, 7:], storage[:, 7:])
