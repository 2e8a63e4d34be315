"""GEMMs of every kind of scales against float64 products of the same FP8 values, and the GEMM of GPUs, torch's with its
conditions met. torch's CPU GEMM stands in for it here."""

import functools
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
from tests.support.copies import both
from tests.support.fp8 import rows_of_range
from tests.tolerances import FAST_SCALED_MM, REFERENCE_MM, SCALED_MM, relative_error

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="the room of the GEMMs of tensor cores needs Triton")
ops = torch.ops.lowering
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


# -- every kind of scales


PAIRS = [
    ("tensor", "tensor"),
    ("rows", "rows"),
    ("1x32", "1x32"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
    ("1x128", "1x128"),
]


def operand(kind: str, outer: int, inner: int, dtype: torch.dtype, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """A copy of rows of different magnitude as GEMMs take it, with its scales; the same as `quantize_...` returns it, where
    there is such a function; and the float64 values."""
    x = rows_of_range(outer, inner, seed=seed)
    if kind == "tensor":
        q, scale_inv = x.to(dtype), torch.tensor((0.3, 1.7)[seed])
        return [(q, scale_inv), (q, scale_inv), (q.double() * scale_inv.double(),)]
    values, compact = quantized(kind, x, dtype, **({} if kind == "1x32" else {"power_of_2": False}))
    factors = torch.exp2(compact.double() - 127) if kind == "1x32" else compact.double()
    height, width = KINDS[kind]
    lines, blocks = torch.arange(outer) // height, torch.arange(inner) // (width or max(inner, 1))
    return [tuple(cast(kind, [x], dtype)), (values, compact), (values.double() * factors[lines][:, blocks],)]


def product(pair, a, b, scale_a, scale_b, bias=None, **options) -> torch.Tensor:
    names = {"tensor": "tensor_wise", "rows": "row_wise"}
    options |= {f"granularity_{x}": Granularity(names.get(kind, f"block_{kind}")) for x, kind in zip("ab", pair, strict=True)}
    return lowering.scaled_mm(a, b.t(), scale_a, scale_b, bias, **options)


@each(
    "shape",
    [(1, 1, 1), (3, 5, 7), (33, 17, 50), (130, 70, 200), (129, 257, 300), (64, 128, 512), (0, 5, 7), (5, 0, 7), (5, 7, 0)],
)
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
        assert out.dtype == out_dtype
        assert out.shape == (m, n)
        assert out.is_contiguous()
        assert not out.numel() or relative_error(out, expected) <= bound
        assert k or torch.equal(out, (torch.zeros(n) if bias is None else bias).to(out_dtype).expand(m, n))
    if k == 300 and "1x32" not in pair:  # the scales as they are, the second's transposed: shapes tell their kinds
        operands = compact_a[0], compact_b[0].t(), compact_a[1], compact_b[1].t()
        for options in ({}, {"fast_accum": True}) if pair[0] in ("tensor", "rows") else ({},):
            out = lowering.scaled_mm(*operands, bias, out_dtype=out_dtype, **options)
            assert relative_error(out, expected) <= bound


@pytest.mark.parametrize("pair", PAIRS)
def test_the_bias_is_added_before_the_one_rounding(pair):
    (a, scale_a), _, (a64,) = operand(pair[0], 4, 16, E4M3, 0)
    (b, scale_b), _, (b64,) = operand(pair[1], 8, 16, E4M3, 1)
    bias = -(a64 @ b64.t())[0].float() * (1 - 2**-7)
    out = product(pair, a, b, scale_a, scale_b, bias)
    assert relative_error(out[0], a64[0] @ b64.t() + bias.double()) < SCALED_MM[torch.bfloat16]


def test_infinity_and_nan_reach_the_product_of_blocks_of_32():
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40] = torch.inf, torch.nan
    (a, scale_a), (b, scale_b) = (cast("1x32", [y], E4M3) for y in (x, torch.ones(16, 64)))
    out = product(("1x32", "1x32"), a, b, scale_a, scale_b)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isinf().all()
    assert out[2].isnan().all()


# -- tensor cores, with scales of tensors and of rows

SHAPES = [(32, 64, 48), (33, 50, 17), (1, 130, 16), (7, 16, 5), (0, 32, 16), (16, 0, 32), (16, 32, 0)]
HOPPER = Platform((9, 0), (12, 9), (2, 13))


def operands(m: int, k: int, n: int, dtypes=(E5M2, E4M3), device: str = "cpu", by_lines: bool = False):
    a, b = torch.randn(m, k, device=device).to(dtypes[0]), torch.randn(n, k, device=device).to(dtypes[1]).t()
    if by_lines:
        return a, b, torch.rand(m, 1, device=device) + 0.1, torch.rand(n, 1, device=device) + 0.1
    return a, b, torch.tensor(0.3, device=device), torch.tensor(1.7, device=device)


def expected_product(a, b, scale_inv_a, scale_inv_b, bias=None) -> torch.Tensor:
    out = (a.double() * scale_inv_a.double()) @ (b.double() * scale_inv_b.double().reshape(1, -1))
    return out if bias is None else out + bias.double()


@functools.cache
def cpu_gemm_takes_rows() -> bool:
    """True if torch's GEMM of CPUs takes a scale per row: before 2.13 it does not."""
    a, b, scale_a, scale_b = operands(16, 16, 16, by_lines=True)
    try:
        torch._scaled_mm(a, b, scale_a, scale_b.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def provided(arguments, platform: Platform = HOPPER, rows: bool = True, **options):
    """Run what a GPU runs, with a GEMM of the CPU as strict as the GPU's about layouts, scales and biases; and the scales that
    it was given."""
    from lowering import tensor_cores as gemm

    lenient, scales, takes_rows = torch._scaled_mm, [], cpu_gemm_takes_rows()

    def strict(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        assert a.stride(1) == b.stride(0) == 1
        assert a.shape[1] % 16 == b.shape[1] % 16 == a.stride(0) % 16 == b.stride(1) % 16 == 0
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == scale_a.data_ptr() % 16 == scale_b.data_ptr() % 16 == 0
        assert 0 not in (*a.shape, *b.shape)
        if scale_a.dim():
            assert scale_a.shape == (a.shape[0], 1)
            assert scale_b.shape == (1, b.shape[1])
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            is_cublaslt = platform.capability == (9, 0) and platform.cuda >= (12, 9)
            assert is_cublaslt or (out_dtype == torch.bfloat16 and b.dtype == E4M3)
            assert platform.capability != (8, 9) or (a.stride(0) == b.stride(1) == a.shape[1] and platform.torch >= (2, 12))
        else:
            assert scale_b.shape == ()
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
            assert bias.shape == (b.shape[1],)
            assert bias.stride(0) == 1
            assert bias.data_ptr() % 16 == 0
        scales.append((scale_a, scale_b))
        if scale_a.dim() and not takes_rows:
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


def of_tensors(*arguments, **options) -> torch.Tensor:
    return provided(arguments, rows=False, **options)[0]


@needs_triton
@pytest.mark.parametrize("rows", [None, (8, 9), (9, 0)])
@pytest.mark.parametrize("out_dtype", FLOATS)
@each("shape", SHAPES)
@each("bias_dtype", [None, *FLOATS])
@each("fast_accum", [False, True])
def test_against_float64(rows, shape, out_dtype, bias_dtype, fast_accum):
    """Scales of tensors, or of rows on a GPU of this capability."""
    arguments = operands(*shape, *([(E4M3, E4M3)] if rows else []), by_lines=rows is not None)
    bias = None if bias_dtype is None else torch.randn(shape[2]).to(bias_dtype)
    platform = Platform(rows or (9, 0), (12, 9), (2, 13))
    out, _ = provided((*arguments, bias), platform, rows is not None, out_dtype=out_dtype, fast_accum=fast_accum)
    assert out.dtype == out_dtype
    assert out.shape == (shape[0], shape[2])
    assert out.is_contiguous()
    assert relative_error(out, expected_product(*arguments, bias)) <= REFERENCE_MM[out_dtype]


@needs_triton
def test_operands_of_any_strides():
    a, b, *scales = operands(48, 64, 32)
    expected = expected_product(a, b, *scales)
    wide = torch.zeros(48, 80, dtype=torch.uint8)
    wide[:, 3:67] = a.view(torch.uint8)
    off = wide.view(a.dtype)[:, 3:67]
    for left in (a, a.t().contiguous().t(), off):
        for right in (b, b.contiguous()):
            out = of_tensors(left, right, *scales, None, out_dtype=torch.float32)
            assert relative_error(out, expected) <= REFERENCE_MM[torch.float32]


@needs_triton
@pytest.mark.parametrize("by_lines", [False, True])
def test_scales_at_any_address(by_lines):
    """cuBLAS 13 refuses those that are not at a multiple of 16 bytes."""
    arguments, scales = operands(48, 64, 32, by_lines=by_lines)[:2], torch.rand(160)

    def part(start, lines):
        return scales[start : start + lines].unsqueeze(1) if by_lines else scales[start]

    for at_a, at_b in ((0, 51), (49, 100), (3, 6)):
        pair = part(at_a, 48), part(at_b, 32)
        out, _ = provided((*arguments, *pair), rows=by_lines, out_dtype=torch.float32)
        assert relative_error(out, expected_product(*arguments, *pair)) <= REFERENCE_MM[torch.float32]


@needs_triton
def test_aligned_operands_are_not_copied():
    from lowering import tensor_cores

    given = *operands(32, 64, 48), None
    with mock.patch.object(torch, "_scaled_mm", return_value=torch.zeros(32, 48)) as called:
        tensor_cores.of_tensors(Product(*given, out_dtype=torch.float32, fast_accum=True))(*given)
    assert [x.data_ptr() for x in called.call_args.args[:2]] == [x.data_ptr() for x in given[:2]]
    assert called.call_args.kwargs["use_fast_accum"] is True


@needs_triton
def test_a_float32_bias_is_rounded_once():
    """out = bf16(product + bias), not bf16(bf16(product) + bias): the two differ for this product and bias."""
    a = torch.tensor([[1.0] + [0.0] * 15]).to(E4M3)
    b = torch.tensor([[1.0] + [0.0] * 15] * 16).to(E4M3).t()
    scale = torch.tensor(1 + 2.0**-8)  # half a unit in bfloat16's last place above 1: alone it would be rounded away
    out = of_tensors(a, b, scale, torch.tensor(1.0), torch.full((16,), 2.0**-8), out_dtype=torch.bfloat16)
    assert out.unique().item() == 1 + 2.0**-7


@needs_triton
def test_any_view_is_a_bias():
    arguments, memory = operands(32, 64, 48), torch.randn(96).bfloat16()
    for bias in (memory[::2], memory[1:49], memory[:1].expand(48)):
        out = of_tensors(*arguments, bias, out_dtype=torch.bfloat16)
        assert relative_error(out, expected_product(*arguments, bias)) <= REFERENCE_MM[torch.bfloat16]


@needs_triton
def test_scalars_and_gaps_among_rows():
    """A scalar is repeated, two are the per-tensor GEMM; on Ada no rows with gaps: torch's kernel for 8.9 takes K for
    the distance of two rows. Which platforms take rows: test_paths.py and test_hardware.py."""
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


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 4096, 4096), (512, 16384, 1024)])
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("by_lines", [False, True])
def test_on_a_gpu(shape, out_dtype, bias_dtype, fast_accum, dtypes, by_lines):
    arguments = operands(*shape, dtypes, "cuda", by_lines)
    bias = None if bias_dtype is None else torch.randn(shape[2], device="cuda").to(bias_dtype)
    kinds = both("row_wise" if by_lines else "tensor_wise")
    out = ops.scaled_mm(*arguments, bias, **kinds, out_dtype=out_dtype, fast_accum=fast_accum)
    assert out.dtype == out_dtype
    assert out.shape == (shape[0], shape[2])
    bounds = FAST_SCALED_MM if fast_accum else SCALED_MM
    assert relative_error(out, expected_product(*arguments, bias)) <= bounds[out_dtype]
