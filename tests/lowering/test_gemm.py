"""GEMMs of every kind of scales against float64 products of the same FP8 values, and the GEMM of GPUs, torch's with its
conditions met. torch's CPU GEMM stands in for it here."""

import itertools
from unittest import mock

import pytest
import torch

import lowering
from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.hardware import Platform
from lowering.products import Product
from tests.lowering.test_quantization import KINDS, cast, quantized
from tests.support.cases import each
from tests.support.fp8 import rows_of_range
from tests.tolerances import REFERENCE_MM, SCALED_MM, relative_error

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="the room of the GEMMs of tensor cores needs Triton")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


# -- every kind of scales


PAIRS = [*((kind, kind) for kind in ("tensor", "rows", "1x32", "1x128")), ("1x128", "128x128"), ("128x128", "1x128")]


def operand(kind: str, outer: int, inner: int, dtype: torch.dtype, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """A copy of rows of different magnitude as GEMMs take it, with its scales; the same as `quantize_...` returns it, where
    there is such a function; and the float64 values."""
    x = rows_of_range(outer, inner, seed=seed)
    if kind == "tensor":
        q, scale_inv = x.to(dtype), torch.tensor((0.3, 1.7)[seed])
        return [(q, scale_inv), (q, scale_inv), (q.double() * scale_inv.double(),)]
    values, compact = quantized(kind, x, dtype, power_of_2=False)
    factors = torch.exp2(compact.double() - 127) if kind == "1x32" else compact.double()
    height, width = KINDS[kind]
    lines, blocks = torch.arange(outer) // height, torch.arange(inner) // (width or max(inner, 1))
    return [tuple(cast(kind, [x], dtype)), (values, compact), (values.double() * factors[lines][:, blocks],)]


def product(pair, a, b, scale_a, scale_b, bias=None, **options) -> torch.Tensor:
    names = {"tensor": "tensor_wise", "rows": "row_wise"}
    options |= {f"granularity_{x}": Granularity(names.get(kind, f"block_{kind}")) for x, kind in zip("ab", pair, strict=True)}
    return lowering.scaled_mm(a, b.t(), scale_a, scale_b, bias, **options)


@each("shape", [(1, 1, 1), (33, 17, 50), (130, 70, 200), (129, 257, 300), (64, 128, 512), (0, 5, 7), (5, 0, 7), (5, 7, 0)])
@each("pair", PAIRS)
@each("out_dtype", FLOATS)
def test_every_kind_against_float64(shape, pair, out_dtype):
    m, n, k = shape
    (a, scale_a), compact_a, (a64,) = operand(pair[0], m, k, E5M2 if n == 17 else E4M3, 0)
    (b, scale_b), compact_b, (b64,) = operand(pair[1], n, k, E5M2 if n == 70 else E4M3, 1)
    bound = (SCALED_MM if "128" in pair[0] else REFERENCE_MM)[out_dtype]
    for bias in (None, *(torch.randn(n).to(dtype) for dtype in FLOATS)):
        out = product(pair, a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
        expected = a64 @ b64.t() + (0 if bias is None else bias.double())
        assert (out.dtype, out.shape, out.is_contiguous()) == (out_dtype, (m, n), True)
        assert not out.numel() or relative_error(out, expected) <= bound
        assert k or torch.equal(out, (torch.zeros(n) if bias is None else bias).to(out_dtype).expand(m, n))
    if k == 300 and "1x32" not in pair:  # the scales as they are, the second's transposed: shapes tell their kinds
        operands = compact_a[0], compact_b[0].t(), compact_a[1], compact_b[1].t()
        for options in ({}, {"fast_accum": True}) if pair[0] in ("tensor", "rows") else ({},):
            out = lowering.scaled_mm(*operands, bias, out_dtype=out_dtype, **options)
            assert relative_error(out, expected) <= bound


# -- tensor cores, with scales of tensors and of rows

SHAPES = [(32, 64, 48), (33, 50, 17), (7, 16, 5), (0, 32, 16), (16, 0, 32), (16, 32, 0)]
HOPPER = Platform((9, 0), (12, 9), (2, 13))


def operands(m: int, k: int, n: int, dtypes=(E5M2, E4M3), by_lines: bool = False):
    a, b = torch.randn(m, k).to(dtypes[0]), torch.randn(n, k).to(dtypes[1]).t()
    return a, b, *((torch.rand(m, 1) + 0.1, torch.rand(n, 1) + 0.1) if by_lines else (torch.tensor(0.3), torch.tensor(1.7)))


def expected_product(a, b, scale_inv_a, scale_inv_b, bias=None) -> torch.Tensor:
    out = (a.double() * scale_inv_a.double()) @ (b.double() * scale_inv_b.double().reshape(1, -1))
    return out if bias is None else out + bias.double()


def provided(arguments, platform: Platform = HOPPER, rows: bool = True, **options):
    """Run what a GPU runs, with a GEMM of the CPU as strict as the GPU's about layouts, scales and biases; and the scales that
    it was given."""
    from lowering import tensor_cores as gemm

    lenient, scales = torch._scaled_mm, []

    def strict(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        assert a.stride(1) == b.stride(0) == 1
        assert a.shape[1] % 16 == b.shape[1] % 16 == a.stride(0) % 16 == b.stride(1) % 16 == 0
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == scale_a.data_ptr() % 16 == scale_b.data_ptr() % 16 == 0
        assert 0 not in (*a.shape, *b.shape)
        if scale_a.dim():
            assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            is_cublaslt = platform.capability == (9, 0) and platform.cuda >= (12, 9)
            assert is_cublaslt or (out_dtype == torch.bfloat16 and b.dtype == E4M3)
            assert platform.capability != (8, 9) or (a.stride(0) == b.stride(1) == a.shape[1] and platform.torch >= (2, 12))
        else:
            assert scale_b.shape == ()
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
            assert (bias.shape, bias.stride(0), bias.data_ptr() % 16) == ((b.shape[1],), 1, 0)
        scales.append((scale_a, scale_b))
        if scale_a.dim():  # torch's GEMM of CPUs takes them from 2.13 on
            return expected_product(a, b, scale_a, scale_b, bias).to(out_dtype)
        return lenient(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    with (
        mock.patch.object(torch, "_scaled_mm", strict),
        mock.patch.object(hardware, "cuda_capability", return_value=platform.capability),
        mock.patch.object(hardware, "platform_of", return_value=platform),
        mock.patch.object(gemm, "rows_refusal", lambda g, _, fast: hardware.rows_refusal(g, torch.device("cuda", 0), fast)),
    ):
        compute = gemm.of_rows if rows else gemm.of_tensors
        return compute(Product(*arguments, **options))(*arguments, *[None] * (len(arguments) == 4)), scales


@needs_triton
@pytest.mark.parametrize("by_lines", [False, True])
@each("out_dtype", FLOATS)
@each("shape", SHAPES)
@each("bias_dtype", [None, *FLOATS])
def test_against_float64(by_lines, shape, out_dtype, bias_dtype):
    """Of every platform: test_hardware.py."""
    arguments = operands(*shape, (E4M3, E4M3), by_lines=by_lines)
    bias = None if bias_dtype is None else torch.randn(shape[2]).to(bias_dtype)
    out, _ = provided((*arguments, bias), rows=by_lines, out_dtype=out_dtype)
    assert (out.dtype, out.shape, out.is_contiguous()) == (out_dtype, (shape[0], shape[2]), True)
    assert relative_error(out, expected_product(*arguments, bias)) <= REFERENCE_MM[out_dtype]


@needs_triton
def test_operands_biases_and_scales_of_any_strides_and_addresses():
    """cuBLAS 13 refuses scales that are not at a multiple of 16 bytes."""
    (a, b, *_), biases, scales = operands(48, 64, 32), torch.randn(96).bfloat16(), torch.rand(160)
    wide = torch.zeros(48, 80, dtype=torch.uint8)
    wide[:, 3:67] = a.view(torch.uint8)
    lefts, rights = (a, a.t().contiguous().t(), wide.view(a.dtype)[:, 3:67]), (b, b.contiguous())
    of_lines = scales[49:97].unsqueeze(1), scales[100:132].unsqueeze(1)
    for left, right, bias, pair in itertools.product(
        lefts, rights, (biases[:64:2], biases[1:33], biases[:1].expand(32)), ((scales[3], scales[6]), of_lines)
    ):
        out, _ = provided((left, right, *pair, bias), rows=pair is of_lines, out_dtype=torch.bfloat16)
        assert relative_error(out, expected_product(a, b, *pair, bias)) <= REFERENCE_MM[torch.bfloat16]


@needs_triton
def test_scalars_and_gaps_among_rows():
    """A scalar is repeated, two are the per-tensor GEMM; on Ada no rows with gaps: torch's kernel for 8.9 takes K for
    the distance of two rows. Which platforms take rows: test_hardware.py."""
    a, b, scale_a, scale_b = operands(32, 128, 48, (E4M3, E4M3), by_lines=True)
    half, third = torch.tensor(0.5), torch.tensor(0.3)
    ada, old = Platform((8, 9), (13, 0), (2, 13)), Platform((9, 0), (12, 8), (2, 13))
    for platform, fast, dims, *arguments in (
        (HOPPER, False, 2, a, b, scale_a, third),
        (old, False, 0, a, b, half, third),
        (ada, True, 0, a[:, :64], b[:64], scale_a, scale_b),
    ):
        out, [given] = provided(arguments, platform, out_dtype=torch.bfloat16, fast_accum=fast)
        assert [scale.dim() for scale in given] == [dims, dims]
        assert arguments[2] is not half or [float(scale) for scale in given] == [0.5, pytest.approx(0.3)]
        assert relative_error(out, expected_product(*arguments)) <= REFERENCE_MM[torch.bfloat16]
