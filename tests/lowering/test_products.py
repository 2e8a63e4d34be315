"""GEMMs of every kind of scales against float64 products of the same FP8 values: biases, output dtypes, empty operands."""

import pytest
import torch

import lowering
from lowering.formats import E4M3, E5M2, Granularity
from tests.lowering.test_quantization import KINDS, cast, quantized
from tests.support.cases import each
from tests.tolerances import REFERENCE_MM, SCALED_MM, relative_error

PAIRS = [
    ("tensor", "tensor"),
    ("rows", "rows"),
    ("1x32", "1x32"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
    ("1x128", "1x128"),
]
SHAPES = [(1, 1, 1), (3, 5, 7), (33, 17, 50), (130, 70, 200), (129, 257, 300), (64, 128, 512), (0, 5, 7), (5, 0, 7), (5, 7, 0)]
FLOATS = list(SCALED_MM)


def operand(kind: str, outer: int, inner: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """A copy of rows of different magnitude as GEMMs take it, its scales, and the float64 values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(outer, inner, generator=generator) * torch.exp(torch.randn(outer, 1, generator=generator))
    if kind == "tensor":
        q, scale_inv = x.to(dtype), torch.tensor((0.3, 1.7)[seed])
        return q, scale_inv, q.double() * scale_inv.double()
    values, compact = quantized(kind, x, dtype, **({} if kind == "1x32" else {"power_of_2": False}))
    factors = torch.exp2(compact.double() - 127) if kind == "1x32" else compact.double()
    height, width = KINDS[kind]
    lines, blocks = torch.arange(outer) // height, torch.arange(inner) // (width or max(inner, 1))
    return *cast(kind, [x], dtype), values.double() * factors[lines][:, blocks]


def product(pair, a, b, scale_a, scale_b, bias=None, **options) -> torch.Tensor:
    names = {"tensor": "tensor_wise", "rows": "row_wise"}
    options |= {f"granularity_{x}": Granularity(names.get(kind, f"block_{kind}")) for x, kind in zip("ab", pair, strict=True)}
    return lowering.scaled_mm(a, b.t(), scale_a, scale_b, bias, **options)


@each("shape", SHAPES)
@each("pair", PAIRS)
@each("out_dtype", FLOATS)
def test_against_float64(shape, pair, out_dtype):
    m, n, k = shape
    a, scale_a, a64 = operand(pair[0], m, k, E5M2 if n == 17 else E4M3, 0)
    b, scale_b, b64 = operand(pair[1], n, k, E5M2 if n == 70 else E4M3, 1)
    for bias in (None, *(torch.randn(n).to(dtype) for dtype in FLOATS)):
        out = product(pair, a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
        expected = a64 @ b64.t() + (0 if bias is None else bias.double())
        assert out.dtype == out_dtype
        assert out.shape == (m, n)
        assert out.is_contiguous()
        bound = (SCALED_MM if "128" in pair[0] else REFERENCE_MM)[out_dtype]
        assert not out.numel() or relative_error(out, expected) <= bound
        assert k or torch.equal(out, (torch.zeros(n) if bias is None else bias).to(out_dtype).expand(m, n))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_bias_is_added_before_the_one_rounding(pair):
    a, scale_a, a64 = operand(pair[0], 4, 16, E4M3, 0)
    b, scale_b, b64 = operand(pair[1], 8, 16, E4M3, 1)
    bias = -(a64 @ b64.t())[0].float() * (1 - 2**-7)
    out = product(pair, a, b, scale_a, scale_b, bias)
    assert relative_error(out[0], a64[0] @ b64.t() + bias.double()) < SCALED_MM[torch.bfloat16]
