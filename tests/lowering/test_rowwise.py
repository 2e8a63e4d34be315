"""One scale per row: an independent oracle, torchao, layouts, edges and rejections; the GEMM with its scales."""

import functools
from unittest import mock

import pytest
import torch

import lowering
from lowering import hardware
from lowering.copies import CastOptions
from lowering.formats import E4M3, E5M2
from lowering.products import Product
from lowering.rowwise import reference
from tests.lowering.test_blockwise import same_bits, wide_range
from tests.lowering.test_gemm import DTYPES as FLOATS
from tests.lowering.test_gemm import SHAPES, expected_product
from tests.lowering.test_gemm import operands as operands_of_gemm
from tests.support.cases import each
from tests.support.copies import both, one_copy
from tests.tolerances import REFERENCE_MM, relative_error

ops = torch.ops.lowering
cast = functools.partial(ops.cast_with_scales, granularity="row_wise")
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="the per-tensor GEMM's room needs Triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 1e-12])
def test_scales_and_values_are_torchaos(dtype, power_of_2, epsilon):
    """torchao counts amaxes below 1e-12 as that; we do with the same epsilon, and rows of zeros have scale 1 without."""
    pytest.importorskip("torchao")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    x = wide_range(200, 96, dtype=dtype)
    x[7] *= 1e-30
    x[9] = 0
    axis = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1, "round_scales_to_power_of_2": power_of_2}
    scale = tensor_to_scale(x, E4M3, **axis)
    q, scale_inv = lowering.quantize_rowwise(x, E4M3, power_of_2=power_of_2, epsilon=epsilon)
    same = torch.ones(200, dtype=torch.bool)
    same[[7, 9]] = bool(epsilon) and power_of_2  # epsilon is float64 there, its quotient may be the neighbouring float32
    assert same_bits(scale_inv[same], scale.reciprocal()[same])
    assert same_bits(q[same], to_fp8_saturated(x.float() * scale, E4M3)[same])


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("pads", [{}, {"pad_rows": True, "pad_cols": True}])
def test_casts_by_amaxes_share_a_vector_of_scales(rowwise, columnwise, pads):
    xs = [wide_range(*shape) for shape in [(33, 50), (0, 5), (16, 32), (1, 1)]]
    wanted = {"rowwise": rowwise, "columnwise": columnwise}
    *data, scales = ops.cast_lines_rowwise(xs, ops.amax_rowwise(xs, **wanted), E4M3, **wanted, **pads)
    slices, length = reference.scale_slices([x.shape for x in xs], CastOptions(rowwise, columnwise, **pads))
    assert scales.shape == (length,)
    assert all(start % 4 == 0 for start, _ in slices)
    orientations = [flag for flag, is_wanted in ((False, rowwise), (True, columnwise)) if is_wanted]
    for place, flag in enumerate(orientations):
        for i, x in enumerate(xs):
            q, scale_inv = cast([x], E4M3, **one_copy(columnwise=flag, pad_outer=bool(pads)), granularity="row_wise")
            assert same_bits(data[place * len(xs) + i], q)
            assert same_bits(scales[slice(*slices[i * len(orientations) + place])], scale_inv[:, 0])


# -- the GEMM


def scaled_mm(*arguments, **options):
    return ops.scaled_mm(*arguments, **both("row_wise"), **options)


def operands(m: int, k: int, n: int, dtypes=(E4M3, E4M3)):
    return operands_of_gemm(m, k, n, dtypes, by_lines=True)


@functools.cache
def cpu_gemm_takes_rows() -> bool:
    """True if torch's GEMM of CPUs takes a scale per row: before 2.13 it does not."""
    a, b, scale_a, scale_b = operands(16, 16, 16)
    try:
        torch._scaled_mm(a, b, scale_a, scale_b.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def provided(arguments, capability, cuda=(12, 9), version=(2, 13), **options):
    """Run what a GPU of this capability runs, with a GEMM of the CPU as strict as the GPU's; and the scales it was given."""
    from lowering import tensor_cores as gemm

    lenient, scales, takes_rows = torch._scaled_mm, [], cpu_gemm_takes_rows()

    def strict(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        assert a.stride(1) == b.stride(0) == 1
        assert a.shape[1] % 16 == b.shape[1] % 16 == a.stride(0) % 16 == b.stride(1) % 16 == 0
        assert 0 not in (*a.shape, *b.shape)
        if scale_a.dim():
            assert scale_a.shape == (a.shape[0], 1)
            assert scale_b.shape == (1, b.shape[1])
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            is_cublaslt = capability == (9, 0) and cuda >= (12, 9)
            assert is_cublaslt or (out_dtype == torch.bfloat16 and b.dtype == E4M3)
            assert capability != (8, 9) or (a.stride(0) == b.stride(1) == a.shape[1] and version >= (2, 12))
        assert bias is None or bias.dtype == out_dtype != torch.float32
        scales.append((scale_a, scale_b))
        if scale_a.dim() and not takes_rows:
            return expected_product(a, b, scale_a, scale_b, bias).to(out_dtype)
        return lenient(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    with (
        mock.patch.object(torch, "_scaled_mm", strict),
        mock.patch.object(hardware, "cuda_capability", return_value=capability),
        mock.patch.object(hardware, "platform_of", return_value=hardware.Platform(capability, cuda, version)),
        mock.patch.object(gemm, "rows_refusal", lambda g, _, fast: hardware.rows_refusal(g, torch.device("cuda", 0), fast)),
    ):
        return gemm.of_rows(Product(*arguments, **options))(*arguments, *[None] * (len(arguments) == 4)), scales


@needs_triton
@each("capability", [(8, 9), (9, 0)])
@each("shape", SHAPES)
@each("out_dtype", FLOATS)
@each("bias_dtype", [None, *FLOATS])
@each("fast_accum", [False, True])
def test_gemm_against_float64(capability, shape, out_dtype, bias_dtype, fast_accum):
    arguments = operands(*shape)
    bias = None if bias_dtype is None else torch.randn(shape[2]).to(bias_dtype)
    wanted = expected_product(*arguments, bias)
    out, _ = provided((*arguments, bias), capability, out_dtype=out_dtype, fast_accum=fast_accum)
    for result in (out, scaled_mm(*arguments, bias, out_dtype=out_dtype)):
        assert result.dtype == out_dtype
        assert result.shape == (shape[0], shape[2])
        assert result.is_contiguous()
        assert relative_error(result, wanted) <= REFERENCE_MM[out_dtype]


@needs_triton
@pytest.mark.parametrize(
    ("platform", "fast_accum", "out_dtype", "is_rowwise"),
    [
        (((9, 0), (12, 9)), False, torch.bfloat16, True),
        (((9, 0), (12, 9)), True, torch.float32, True),
        (((9, 0), (12, 8)), True, torch.bfloat16, True),
        (((9, 0), (12, 8)), False, torch.bfloat16, False),
        (((8, 9), (12, 9)), True, torch.bfloat16, True),
        (((8, 9), (13, 0), (2, 11)), True, torch.bfloat16, False),
        (((8, 9), (12, 9)), False, torch.bfloat16, False),
        (((8, 9), (12, 9)), True, torch.float32, False),
        (((10, 0), (13, 0)), False, torch.bfloat16, True),
        (((12, 0), (13, 0)), False, torch.bfloat16, True),
        (((12, 0), (13, 0)), False, torch.float32, False),
    ],
)
def test_which_gemm_runs(platform, fast_accum, out_dtype, is_rowwise):
    """NOTE [scales after the GEMM]: CUTLASS's rowwise kernel only where it is right and fast and takes the output."""
    a, b, scale_inv_a, _ = operands(32, 64, 48)
    arguments = a, b, scale_inv_a, torch.tensor(0.3)  # a scalar is repeated
    out, [(scale_a, scale_b)] = provided(arguments, *platform, out_dtype=out_dtype, fast_accum=fast_accum)
    assert (scale_a.dim() == scale_b.dim() == 2) is is_rowwise
    assert relative_error(out, expected_product(*arguments)) <= REFERENCE_MM[out_dtype]


@needs_triton
@pytest.mark.parametrize("platform", [((8, 9), (13, 0)), ((9, 0), (12, 8)), ((10, 0), (13, 0)), ((12, 0), (13, 0))])
def test_what_cutlass_does_not_take(platform):
    """No E5M2 as the second operand; on Ada no rows with gaps: torch's kernel for 8.9 takes K for the distance of two rows."""
    a, b, *scales = operands(32, 128, 48)
    for arguments in (operands(32, 64, 48, (E4M3, E5M2)), *([(a[:, :64], b[:64], *scales)] if platform[0] == (8, 9) else [])):
        out, [(scale_a, _)] = provided(arguments, *platform, out_dtype=torch.bfloat16, fast_accum=True)
        assert scale_a.dim() == 0
        assert relative_error(out, expected_product(*arguments)) <= REFERENCE_MM[torch.bfloat16]


@needs_triton
def test_two_scalars_are_the_per_tensor_gemm():
    a, b, *_ = operands(32, 64, 48)
    arguments = a, b, torch.tensor(0.5), torch.tensor(0.3)
    out, [scales] = provided(arguments, (9, 0), (12, 8), out_dtype=torch.bfloat16)
    assert [float(scale) for scale in scales] == [0.5, pytest.approx(0.3)]
    assert relative_error(out, expected_product(*arguments)) <= REFERENCE_MM[torch.bfloat16]


@pytest.mark.parametrize(("k", "fast_accum"), [(200, False), (200, True), (64, True), (64, False), (128, False)])
def test_the_public_gemm_takes_the_scales_of_quantize_rowwise(k, fast_accum):
    x, w, bias = wide_range(24, k), wide_range(40, k, seed=1), torch.randn(40)
    (a, scale_inv_a), (b, scale_inv_b) = (lowering.quantize_rowwise(t, E4M3) for t in (x, w))
    arguments = a, b.t(), scale_inv_a, scale_inv_b
    out = lowering.scaled_mm(*arguments[:3], scale_inv_b.t(), bias, out_dtype=torch.float32, fast_accum=fast_accum)
    assert relative_error(out, expected_product(*arguments, bias)) <= REFERENCE_MM[torch.float32]
