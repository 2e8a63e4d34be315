"""Statistics of quantization against NumPy: counts exactly, sums to 1e-6, with every special value."""

import itertools

import numpy as np
import pytest
import torch

from lowering import statistics as s
from lowering.formats import E4M3, E5M2
from tests.support.fp8 import rounded

SUMS = 1e-6


def op(*args, **options):
    """The statistics of the one copy that is asked for."""
    (found,) = torch.ops.lowering.quantization_statistics(*args, **options)
    return found


LIMIT = {E4M3: 448.0, E5M2: 57344.0}
#: What rounds to the limit: up to the middle between it and the value that would follow.
ROUNDED = {E4M3: 464.0, E5M2: 61440.0}


def power_of_2_below(scale):
    return np.float32(np.ldexp(1.0, np.frexp(scale)[1] - 1))


def scales(block, dtype, kind, power_of_2):
    """The factor of a block, and its FP8 values."""
    amax = np.abs(block).max() if block.size else np.float32(0)
    if kind == "block_1x32":
        quotient = np.float32(amax / np.float32(LIMIT[dtype]))
        if np.isnan(quotient):
            return np.float32(np.nan), np.float32(np.nan)
        if np.isinf(quotient):
            return np.float32(2.0**-127), np.float32(2.0**127)
        mantissa, exponent = np.frexp(quotient) if quotient else (0.5, -200)
        code = exponent - 1 if mantissa == 0.5 else exponent
        return (np.float32(2.0**-code), np.float32(2.0**code)) if code > -127 else (np.float32(1), np.float32(2.0**-127))
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(LIMIT[dtype]) / np.float32(amax)
    if not np.isfinite(amax) or amax == 0:
        scale = np.float32(1)
    elif np.isinf(scale):
        scale = np.finfo(np.float32).max
    scale = power_of_2_below(scale) if power_of_2 else scale
    return scale, np.float32(1) / scale


def oracle(blocks, dtype):
    """Statistics of blocks, (values float32, scale, scale_inv) each."""
    counts, squares, errors, headroom, ratio, amaxes = np.zeros(4), [], [], [], [], []
    for values, scale, scale_inv in blocks:
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.float32(values) * np.float32(scale)
        finite = np.isfinite(values)
        q = rounded(scaled.astype(np.float64), dtype)
        counts += [
            values.size,
            np.sum(finite & (values != 0) & (q == 0) & ~np.isnan(scaled)),
            np.sum(finite & (np.abs(scaled) > ROUNDED[dtype])),
            np.sum(~finite),
        ]
        keeps = finite & ~np.isnan(scaled)
        x = values[keeps].astype(np.float64)
        squares.append(np.sum(x**2))
        errors.append(np.sum((x - q[keeps] * np.float64(scale_inv)) ** 2))
        amax = np.abs(x).max() if x.size else 0.0
        amaxes.append(amax)
        if amax:
            headroom.append(LIMIT[dtype] / (amax * np.float64(scale)))
            ratio.append(squares[-1] / errors[-1] if errors[-1] else np.inf)

    def quantiles(values):
        return [np.sort(values)[int(np.floor(q * (len(values) - 1)))] if values else np.inf for q in (0, 0.1, 0.5, 0.9, 1)]

    return np.array([*counts, sum(squares), sum(errors), max(amaxes, default=0), 1, *quantiles(headroom), *quantiles(ratio)])


def check(found, wanted):
    found = found.numpy()
    assert np.array_equal(found[:4], wanted[:4])
    assert np.allclose(found[4:], wanted[4:], rtol=SUMS, atol=0, equal_nan=False)


def sample(rows, cols, seed=0, dtype=torch.float32, spread=12.0):
    """Magnitudes over many binades, with both zeros, underflow of both signs, NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * torch.exp(spread * (torch.rand(rows, cols, generator=g) - 0.7))
    flat = x.view(-1)
    if flat.numel() > 40:
        specials = torch.tensor([0.0, -0.0, 1e-30, -1e-30, -1e-9, 1e-42, torch.nan, torch.inf, -torch.inf, 3e38])
        flat[torch.randperm(flat.numel(), generator=g)[:10]] = specials
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(33, 70), (1, 1), (0, 16), (16, 0)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**20])
def test_one_scale(dtype, shape, scale):
    x, factor = sample(*shape), torch.tensor(scale)
    found = op(x, dtype, factor, factor.reciprocal(), granularity="tensor_wise")
    check(found, oracle([(x.numpy(), np.float32(scale), np.float32(1) / np.float32(scale))], dtype))


def test_what_counts_as_lost():
    """-0.0 is not lost; a negative element that becomes -0.0 is; NaN and infinities are neither lost nor clipped."""
    x = torch.tensor([[0.0, -0.0, 1e-9, -1e-9, 464.0, 465.0, -1e9, torch.nan, torch.inf, -torch.inf, 1.0, 2.0**-10]])
    found = op(x, E4M3, torch.tensor(1.0), torch.tensor(1.0), granularity="tensor_wise")
    assert found[:4].tolist() == [12, 3, 2, 3]
    assert found[s.AMAX] == torch.tensor(1e9)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("kind", "square", "power_of_2"),
    [
        ("row_wise", False, True),
        ("row_wise", False, False),
        ("block_1x128", False, True),
        ("block_128x128", False, False),
        ("block_1x32", False, True),
        ("block_1x32", True, True),
    ],
)
def test_scales_of_blocks(kind, square, power_of_2, dtype, columnwise):
    x = sample(150, 200)
    lines = x.numpy().T if columnwise else x.numpy()
    check(statistics(x, dtype, kind, square, power_of_2, columnwise), blocks_oracle(lines, dtype, kind, square, power_of_2))


def statistics(x, dtype, kind, square, power_of_2, columnwise, offs=None, index=None):
    sides = {"rowwise": not columnwise, "columnwise": columnwise}
    options = {"granularity": kind, "square": square, "power_of_2": power_of_2, **sides}
    return op(x, dtype, None, None, offs, index, **options)


def cut(lines, kind, square):
    height, width = {"row_wise": (1, lines.shape[1]), "block_1x128": (1, 128), "block_128x128": (128, 128)}.get(kind, (1, 32))
    height = 32 if square else height
    for row in range(0, lines.shape[0], height):
        for col in range(0, lines.shape[1], max(width, 1)):
            yield lines[row : row + height, col : col + width]


def blocks_oracle(lines, dtype, kind, square, power_of_2):
    found = [(b, *scales(b, dtype, kind, power_of_2)) for b in cut(lines, kind, square)]
    return oracle(found, dtype)


def test_both_copies_at_once_are_those_of_each():
    x, options = sample(70, 50), {"granularity": "block_1x32"}
    both = torch.ops.lowering.quantization_statistics(x, E4M3, **options, columnwise=True)
    for columnwise, found in enumerate(both):
        assert torch.equal(found, op(x, E4M3, **options, rowwise=not columnwise, columnwise=bool(columnwise)))


def test_half_precision_and_a_stack():
    x = torch.stack([sample(32, 48, seed, torch.bfloat16) for seed in range(3)])
    factor = torch.tensor([1.0, 7.0, 0.01])
    found = op(x, E4M3, factor, factor.reciprocal(), granularity="tensor_wise")
    blocks = [(m.float().numpy(), f, np.float32(1) / f) for m, f in zip(x, factor.numpy(), strict=True)]
    check(found, oracle(blocks, E4M3))
    one = op(x, E4M3, factor[1], factor[1].reciprocal(), granularity="tensor_wise")
    check(one, oracle([(x.float().numpy(), np.float32(7), np.float32(1) / np.float32(7))], E4M3))
    found = statistics(x, E4M3, "row_wise", False, True, True)
    lines = [m.float().numpy().T for m in x]
    blocks = [(b, *scales(b, E4M3, "row_wise", True)) for m in lines for b in cut(m, "row_wise", False)]
    check(found, oracle(blocks, E4M3))


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("kind", ["row_wise", "block_1x128", "block_1x32"])
def test_groups_have_scales_of_their_own(kind, with_index):
    """Columnwise each group by itself, an empty one among them; rows beyond the last group may hold anything."""
    x = sample(180, 24)
    offs = torch.tensor([70, 70, 111, 150], dtype=torch.int32)
    index = torch.randperm(180, generator=torch.Generator().manual_seed(3)) if with_index else None
    rows = (x if index is None else x[index]).numpy()
    x[(torch.arange(180) if index is None else index)[150:]] = torch.nan
    starts = [0, *offs.tolist()]
    groups = [rows[a:b].T for a, b in itertools.pairwise(starts)]
    blocks = [(b, *scales(b, E4M3, kind, True)) for group in groups if group.size for b in cut(group, kind, False)]
    check(statistics(x, E4M3, kind, False, True, True, offs, index), oracle(blocks, E4M3))
    used = rows[:150]
    check(statistics(x, E4M3, kind, False, True, False, offs, index), blocks_oracle(used, E4M3, kind, False, True))
    factor = torch.tensor(5.0)
    found = op(x, E4M3, factor, factor.reciprocal(), offs, index, granularity="tensor_wise")
    check(found, oracle([(used, np.float32(5), np.float32(1) / np.float32(5))], E4M3))


def test_stacks_of_blocks():
    """The weights of experts: every kind of block, both copies."""
    x = torch.stack([sample(150, 200, seed, torch.bfloat16) for seed in range(2)])
    for kind, square, columnwise in itertools.product(
        ("block_128x128", "block_1x128", "block_1x32"), (False, True), (False, True)
    ):
        if square and kind != "block_1x32":
            continue
        lines = [m.float().numpy().T if columnwise else m.float().numpy() for m in x]
        blocks = [(b, *scales(b, E4M3, kind, True)) for m in lines for b in cut(m, kind, square)]
        check(statistics(x, E4M3, kind, square, True, columnwise), oracle(blocks, E4M3))


@pytest.mark.parametrize("inverse", ["multiply", "divide"])
def test_scales_of_engines(inverse):
    """vLLM divides by a scale that has a smallest value, DeepGEMM multiplies by its reciprocal."""
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 40)[:, None]
    epsilon = 1e-3
    found = op(x, E4M3, granularity="row_wise", inverse=inverse, epsilon=epsilon)
    rows = x.numpy()
    scale_inv = np.maximum(np.abs(rows).max(1, keepdims=True), np.float32(epsilon)) / np.float32(448)
    scaled = rows / scale_inv if inverse == "divide" else rows * (np.float32(1) / scale_inv)
    q = rounded(scaled.astype(np.float64), E4M3)
    exact = rows.astype(np.float64)
    errors = np.sum((exact - q * scale_inv.astype(np.float64)) ** 2)
    assert found[:4].tolist() == [x.numel(), np.sum((q == 0) & (rows != 0)), np.sum(np.abs(scaled) > 464), 0]
    assert np.allclose(found[4:6], [np.sum(exact**2), errors], rtol=SUMS)


def test_chunks_of_large_tensors_add_up(monkeypatch):
    x = sample(300, 64)
    whole = [statistics(x, E4M3, kind, False, True, False) for kind in ("row_wise", "block_128x128")]
    monkeypatch.setattr(s, "_CHUNK", 1000)
    parts = [statistics(x, E4M3, kind, False, True, False) for kind in ("row_wise", "block_128x128")]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert torch.equal(a[:4], b[:4])


def test_merging_is_the_statistics_of_both():
    first, second = sample(20, 64, 0), sample(30, 64, 1)
    factor = torch.tensor(2.0)
    each = [op(x, E4M3, factor, factor / 4, granularity="tensor_wise") for x in (first, second, torch.cat([first, second]))]
    buffer = s.empty_statistics(3, torch.device("cpu"))
    torch.ops.lowering.record_statistics(buffer, each[:2], [1, 1])
    assert torch.equal(buffer[0], s.empty_statistics(1, torch.device("cpu"))[0])
    buffer = s.empty_statistics(3, torch.device("cpu"))
    for vector in each[:2]:
        torch.ops.lowering.record_statistics(buffer, [vector], [1])
    assert torch.equal(buffer[1, :4], each[2][:4])
    torch.testing.assert_close(buffer[1, 4:7], each[2][4:7], rtol=1e-12, atol=0)
    assert buffer[1, s.CALLS] == 2
    assert buffer[1, s.RATIO] == min(v[s.RATIO] for v in each[:2])


def test_results_of_gemms():
    a, b, bias = torch.randn(8, 16), torch.randn(16, 4), torch.randn(4)
    out = a @ b + bias + 0.01
    found = s._product(out, a, b, None, bias)
    exact = (a @ b + bias).double().numpy()
    assert np.allclose(found[s.SQUARES], np.sum(exact**2), rtol=SUMS)
    assert np.allclose(found[s.ERRORS], 32 * 0.01**2, rtol=1e-3)
