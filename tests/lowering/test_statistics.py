"""Statistics of quantization against NumPy: counts exactly, sums to 1e-6."""

import numpy as np
import torch

from lowering import statistics as s
from lowering.formats import E4M3, E5M2
from tests.lowering.test_quantization import SQUARES
from tests.lowering.test_quantization import oracle as quantized
from tests.support.cases import each
from tests.support.fp8 import VALUES, rounded

SUMS = 1e-6
#: What rounds to the limit: up to the middle between it and the value that would follow.
ROUNDED = {E4M3: 464.0, E5M2: 61440.0}
KINDS = {"row_wise": "rows", "block_1x128": "1x128", "block_128x128": "128x128", "block_1x32": "1x32", "squares": "32x32"}


def op(*args, **options):
    """The statistics of the one copy that is asked for."""
    (found,) = torch.ops.lowering.quantization_statistics(*args, **options)
    return found


def oracle(blocks, dtype):
    """Statistics of blocks, (values float32, scale, scale_inv) each."""
    counts, squares, errors, headroom, ratio, amaxes = np.zeros(4), [], [], [], [], []
    for values, scale, scale_inv in blocks:
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.float32(values) * np.float32(scale)
        finite = np.isfinite(values)
        q = rounded(scaled.astype(np.float64), dtype)
        lost, clipped = finite & (values != 0) & (q == 0), finite & (np.abs(scaled) > ROUNDED[dtype])
        counts += [values.size, np.sum(lost), np.sum(clipped), np.sum(~finite)]
        x = values[finite].astype(np.float64)
        squares.append(np.sum(x**2))
        errors.append(np.sum((x - q[finite] * np.float64(scale_inv)) ** 2))
        amaxes.append(np.abs(x).max() if x.size else 0.0)
        if amaxes[-1]:
            headroom.append(VALUES[dtype][-1] / (amaxes[-1] * np.float64(scale)))
            ratio.append(squares[-1] / errors[-1] if errors[-1] else np.inf)

    def quantiles(values):
        return [np.sort(values)[int(np.floor(q * (len(values) - 1)))] if values else np.inf for q in (0, 0.1, 0.5, 0.9, 1)]

    return np.array([*counts, sum(squares), sum(errors), max(amaxes, default=0), 1, *quantiles(headroom), *quantiles(ratio)])


def check(found, wanted):
    assert np.array_equal(found[:4].numpy(), wanted[:4])
    assert np.allclose(found[4:].numpy(), wanted[4:], rtol=SUMS, atol=0, equal_nan=False)


def sample(rows, cols, seed=0, dtype=torch.float32, specials=()):
    """Magnitudes over many binades, with both zeros and underflow of both signs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * torch.exp(12 * (torch.rand(rows, cols, generator=g) - 0.7))
    if x.numel() > 40:
        values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, -1e-9, 1e-42, *specials])
        x.view(-1)[torch.randperm(x.numel(), generator=g)[: len(values)]] = values
    return x.to(dtype)


def of_tensor(x, dtype, factor):
    factor = torch.as_tensor(factor)
    return op(x, dtype, factor, factor.reciprocal(), granularity="tensor_wise")


def of_blocks(x, dtype, kind, power_of_2=True, columnwise=False):
    """kind: a granularity, or "squares", those of MXFP8."""
    sides = {"rowwise": not columnwise, "columnwise": columnwise}
    options = {"granularity": "block_1x32" if kind == "squares" else kind, "square": kind == "squares"}
    return op(x, dtype, power_of_2=power_of_2, **options, **sides)


def oracle_of_blocks(matrix, dtype, kind, power_of_2, columnwise):
    """With the scales of the oracle of quantization."""
    lines, blocks = (matrix.t() if columnwise else matrix), []
    _, scale_inv = quantized(lines, dtype, KINDS[kind], power_of_2)
    height, width = SQUARES[KINDS[kind]]
    width = width or lines.shape[1]
    for i, j in np.ndindex(scale_inv.shape):
        factor = np.float32(2.0 ** (float(scale_inv[i, j]) - 127)) if "32" in KINDS[kind] else scale_inv[i, j]
        block = lines.numpy()[i * height : (i + 1) * height, j * width : (j + 1) * width]
        is_rounded = not power_of_2 and "32" not in KINDS[kind]
        scale = np.float32(VALUES[dtype][-1]) / np.abs(block).max() if is_rounded else np.float32(1) / factor
        blocks.append((block, scale, factor))
    return oracle(blocks, dtype)


@each("dtype", [E4M3, E5M2])
@each("shape", [(33, 70), (1, 1), (0, 16), (16, 0)])
@each("scale", [1.0, 3.7, 2.0**20])
def test_one_scale(dtype, shape, scale):
    x = sample(*shape, specials=(torch.nan, torch.inf, -torch.inf, 3e38))
    check(of_tensor(x, dtype, scale), oracle([(x.numpy(), np.float32(scale), np.float32(1) / np.float32(scale))], dtype))


@each("columnwise", [False, True])
@each("dtype", [E4M3, E5M2])
@each("kind", KINDS)
@each("power_of_2", [False, True])
def test_scales_of_blocks(kind, power_of_2, dtype, columnwise, monkeypatch):
    x, how = sample(150, 200), (dtype, kind, power_of_2, columnwise)
    check(of_blocks(x, *how), oracle_of_blocks(x, *how))
    with monkeypatch.context() as patch:
        patch.setattr(s, "_CHUNK", 1000)
        check(of_blocks(x, *how), oracle_of_blocks(x, *how))
