"""Statistics of quantization against NumPy: counts exactly, sums to 1e-6, with every special value."""

import itertools

import numpy as np
import torch

from lowering import statistics as s
from lowering.formats import E4M3, E5M2
from tests.support.cases import each
from tests.support.fp8 import VALUES, rounded

SUMS = 1e-6


def op(*args, **options):
    """The statistics of the one copy that is asked for."""
    (found,) = torch.ops.lowering.quantization_statistics(*args, **options)
    return found


LIMIT = {dtype: values[-1] for dtype, values in VALUES.items()}
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


def of_tensor(x, dtype, factor, offs=None, index=None):
    factor = torch.as_tensor(factor)
    return op(x, dtype, factor, factor.reciprocal(), offs, index, granularity="tensor_wise")


def oracle_of_tensor(matrices, dtype, factors):
    factors = np.float32(factors)
    return oracle([(m.float().numpy(), f, np.float32(1) / f) for m, f in zip(matrices, factors, strict=True)], dtype)


def of_blocks(x, dtype, kind, power_of_2=True, columnwise=False, offs=None, index=None):
    """kind: a granularity, or "squares", those of MXFP8."""
    sides = {"rowwise": not columnwise, "columnwise": columnwise}
    options = {"granularity": "block_1x32" if kind == "squares" else kind, "square": kind == "squares"}
    return op(x, dtype, None, None, offs, index, power_of_2=power_of_2, **options, **sides)


def oracle_of_blocks(matrices, dtype, kind, power_of_2=True, columnwise=False):
    blocks = []
    for matrix in matrices:
        lines = matrix.float().numpy().T if columnwise else matrix.float().numpy()
        height, width = {"row_wise": (1, lines.shape[1]), "block_1x128": (1, 128), "block_1x32": (1, 32)}.get(kind, (128, 128))
        height, width = (32, 32) if kind == "squares" else (height, max(width, 1))
        for row, col in itertools.product(range(0, lines.shape[0], height), range(0, lines.shape[1], width)):
            block = lines[row : row + height, col : col + width]
            blocks.append((block, *scales(block, dtype, "block_1x32" if kind == "squares" else kind, power_of_2)))
    return oracle(blocks, dtype)


@each("dtype", [E4M3, E5M2])
@each("shape", [(33, 70), (1, 1), (0, 16), (16, 0)])
@each("scale", [1.0, 3.7, 2.0**20])
def test_one_scale(dtype, shape, scale):
    x = sample(*shape)
    check(of_tensor(x, dtype, scale), oracle_of_tensor([x], dtype, [scale]))


def test_what_counts_as_lost():
    """-0.0 is not lost; a negative element that becomes -0.0 is; NaN and infinities are neither lost nor clipped."""
    x = torch.tensor([[0.0, -0.0, 1e-9, -1e-9, 464.0, 465.0, -1e9, torch.nan, torch.inf, -torch.inf, 1.0, 2.0**-10]])
    found = of_tensor(x, E4M3, 1.0)
    assert found[:4].tolist() == [12, 3, 2, 3]
    assert found[s.AMAX] == torch.tensor(1e9)


BLOCKS = ("block_1x128", "block_128x128", "block_1x32", "squares")


@each("columnwise", [False, True])
@each("dtype", [E4M3, E5M2])
@each("kind", ["row_wise", *BLOCKS])
@each("power_of_2", [False, True])
def test_scales_of_blocks(kind, power_of_2, dtype, columnwise):
    x, how = sample(150, 200), (dtype, kind, power_of_2, columnwise)
    check(of_blocks(x, *how), oracle_of_blocks([x], *how))


def test_both_copies_at_once_are_those_of_each():
    x, options = sample(70, 50), {"granularity": "block_1x32"}
    both = torch.ops.lowering.quantization_statistics(x, E4M3, **options, columnwise=True)
    for columnwise, found in enumerate(both):
        assert torch.equal(found, op(x, E4M3, **options, rowwise=not columnwise, columnwise=bool(columnwise)))


@each("kind", ["row_wise", *BLOCKS])
@each("columnwise", [False, True])
def test_stacks_in_half_precision(kind, columnwise):
    """The weights of experts."""
    x = torch.stack([sample(140, 170, seed, torch.bfloat16) for seed in range(2)])
    how = E4M3, kind, True, columnwise
    check(of_blocks(x, *how), oracle_of_blocks(x, *how))
    for factors in ([7.0, 0.01], [7.0, 7.0]):
        factor = torch.tensor(factors if factors[0] != factors[1] else 7.0)
        check(of_tensor(x, E4M3, factor), oracle_of_tensor(x, E4M3, factors))


@each("with_index", [False, True])
@each("kind", ["row_wise", "block_1x128", "block_1x32"])
def test_groups_have_scales_of_their_own(kind, with_index):
    """Columnwise each group by itself, an empty one among them; rows beyond the last group may hold anything."""
    x = sample(180, 24)
    offs = torch.tensor([70, 70, 111, 150], dtype=torch.int32)
    index = torch.randperm(180, generator=torch.Generator().manual_seed(3)) if with_index else None
    rows = (x if index is None else x[index]).clone()
    x[(torch.arange(180) if index is None else index)[150:]] = torch.nan
    groups = [rows[a:b] for a, b in itertools.pairwise([0, *offs.tolist()]) if a != b]
    check(of_blocks(x, E4M3, kind, True, True, offs, index), oracle_of_blocks(groups, E4M3, kind, True, True))
    check(of_blocks(x, E4M3, kind, True, False, offs, index), oracle_of_blocks([rows[:150]], E4M3, kind))
    check(of_tensor(x, E4M3, 5.0, offs, index), oracle_of_tensor([rows[:150]], E4M3, [5.0]))


@each("inverse", ["multiply", "divide"])
def test_scales_of_engines(inverse):
    """vLLM divides by a scale that has a smallest value, DeepGEMM multiplies by its reciprocal."""
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 40)[:, None]
    found = op(x, E4M3, granularity="row_wise", inverse=inverse, epsilon=1e-3)
    rows = x.numpy()
    scale_inv = np.maximum(np.abs(rows).max(1, keepdims=True), np.float32(1e-3)) / np.float32(448)
    scaled = rows / scale_inv if inverse == "divide" else rows * (np.float32(1) / scale_inv)
    q, exact = rounded(scaled.astype(np.float64), E4M3), rows.astype(np.float64)
    assert found[:4].tolist() == [x.numel(), np.sum((q == 0) & (rows != 0)), np.sum(np.abs(scaled) > 464), 0]
    errors = np.sum((exact - q * scale_inv.astype(np.float64)) ** 2)
    assert np.allclose(found[4:6], [np.sum(exact**2), errors], rtol=SUMS)


def test_chunks_of_large_tensors_add_up(monkeypatch):
    x, kinds = sample(300, 64), ("row_wise", "block_128x128")
    whole = [of_blocks(x, E4M3, kind) for kind in kinds]
    monkeypatch.setattr(s, "_CHUNK", 1000)
    for kind, of_whole in zip(kinds, whole, strict=True):
        of_parts = of_blocks(x, E4M3, kind)
        torch.testing.assert_close(of_whole, of_parts, rtol=1e-12, atol=0)
        assert torch.equal(of_whole[:4], of_parts[:4])


def test_merging_is_the_statistics_of_both():
    first, second = sample(20, 64, 0), sample(30, 64, 1)
    factor = torch.tensor(2.0)
    *parts, both = (
        op(x, E4M3, factor, factor / 4, granularity="tensor_wise") for x in (first, second, torch.cat([first, second]))
    )
    empty = s.empty_statistics(3, torch.device("cpu"))
    buffer = empty.clone()
    for vector in parts:
        torch.ops.lowering.record_statistics(buffer, [vector], [1])
    assert torch.equal(buffer[0], empty[0])
    assert torch.equal(buffer[1, :4], both[:4])
    torch.testing.assert_close(buffer[1, 4:7], both[4:7], rtol=1e-12, atol=0)
    assert buffer[1, s.CALLS] == 2
    assert buffer[1, s.RATIO] == min(part[s.RATIO] for part in parts)


def test_results_of_gemms():
    a, b, bias = torch.randn(8, 16), torch.randn(16, 4), torch.randn(4)
    exact = a @ b + bias
    found = s._product(exact + 0.01, a, b, None, bias)
    assert np.allclose(found[s.SQUARES], np.sum(exact.double().numpy() ** 2), rtol=SUMS)
    assert np.allclose(found[s.ERRORS], 32 * 0.01**2, rtol=1e-3)
