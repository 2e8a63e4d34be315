"""MXFP8: casts against torchao and float64, layouts, edges, the GEMM and its dispatch, rejections."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowering
from lowering import gemm as dense
from lowering import hardware
from lowering import scaling as blocks
from lowering.formats import E4M3, E5M2, FP8_MAX
from lowering.mxfp8 import gemm, reference
from lowering.products import Product
from tests.lowering.deep_gemm_stand_in import require_trial
from tests.support.cases import each
from tests.support.copies import both
from tests.tolerances import SCALED_MM

ops = torch.ops.lowering
scaled_mm, by_decision = (functools.partial(f, **both("block_1x32")) for f in (dense.scaled_mm, dense.by_decision))
cast = functools.partial(ops.cast_with_scales, granularity="block_1x32")
gemm_ready = functools.partial(lowering.gemm_ready, granularity="block_1x32")
multiplied = functools.partial(lowering.scaled_mm, **both("block_1x32"))
SHAPES = [(1, 32), (3, 64), (128, 128), (160, 96), (129, 288)]
RAGGED = [(1, 1), (5, 33), (100, 150), (129, 257), (0, 7), (4, 0)]


@pytest.fixture(autouse=True)
def _decisions_of_its_own(monkeypatch):
    monkeypatch.setattr(dense, "DECISIONS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def wide_range(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape[0], 1, generator=generator))
    return values.to(dtype)


def edges(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of one block each: every power of two, and the value a step below and above, as amax among small values; zeros,
    subnormals, the largest number, inf, NaN, and both. [rows, 32]."""
    finfo = torch.finfo(dtype)
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)
    at_limits = torch.cat([powers * factor for factor in (1.0, 1.75, 1.75 * (1 - 2**-8), 1.75 * (1 + 2**-7))])
    lowest = [0.0, finfo.smallest_normal, finfo.smallest_normal / 2, finfo.max, 448 * 2.0**-127, 448 * 2.0**-126]
    amaxes = torch.cat([at_limits, torch.tensor([*lowest, torch.inf, torch.nan, -torch.inf], dtype=torch.float64)]).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(amaxes.numel(), 32, generator=generator).double() * 2 - 1) * amaxes.double()[:, None].nan_to_num(1.0)
    x = x.nan_to_num(1e30, 1e30, -1e30).to(dtype)
    x[:, 7] = amaxes
    x[::3, 9] = -0.0
    both = torch.ones(1, 32, dtype=dtype)
    both[0, :2] = torch.tensor([torch.inf, torch.nan])
    return torch.cat([x, both])


def codes_of(q: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all of them: the sign of a NaN is free."""
    return q.view(torch.uint8).masked_fill(q.float().isnan(), 0x7F)


def to_mx(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's FP8 values and E8M0 codes of x [rows, 32 * blocks]."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scale, q = mx.to_mx(x.contiguous(), dtype, 32, mx.ScaleCalculationMode.RCEIL)
    return q, scale.view(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_both_orientations_are_torchaos(shape, dtype, given):
    x = wide_range(*shape, dtype=given)
    for oriented in (x, x.t()):
        if oriented.shape[1] % 32 == 0:
            q, codes = lowering.quantize_mxfp8(oriented, dtype)
            expected_q, expected_codes = to_mx(oriented, dtype)
            assert torch.equal(codes, expected_codes)
            assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_zeros_subnormals_nan_inf_and_every_code_are_torchaos(dtype, given):
    x = edges(given)
    q, codes = lowering.quantize_mxfp8(x, dtype)
    expected_q, expected_codes = to_mx(x, dtype)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(codes_of(q), codes_of(expected_q))
    assert {0, 1, 254, 255} <= set(codes.flatten().tolist())
    q_t, scale_t = cast([x.t().contiguous()], dtype, rowwise=False, columnwise=True)
    assert torch.equal(codes_of(q_t), codes_of(expected_q))
    assert torch.equal(reference.unswizzled(scale_t, *x.shape), expected_codes)


def test_quotients_just_above_a_power_of_two_round_up():
    """A float32 logarithm, torchao's way off SM100, rounds some of these down; the instruction of SM100 does not."""
    exponents = torch.arange(-117, 118)
    amax = 448 * torch.exp2(exponents.float()) * (1 + 2**-23)
    assert torch.equal(blocks.e8m0_from_amax(amax, E4M3).int(), exponents + 128)
    assert torch.equal(blocks.e8m0_from_amax(448 * torch.exp2(exponents.float()), E4M3).int(), exponents + 127)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_codes_are_the_smallest_powers_of_two_that_hold_the_block(dtype):
    """By exact integers' logarithms, for the float32 quotient that the definition names."""
    amax = torch.cat([wide_range(2000, 1, seed=3).abs().flatten(), torch.tensor([1e-45, 1e-40, 1e-38, 3e38])])
    for value, code in zip(amax / FP8_MAX[dtype], blocks.e8m0_from_amax(amax, dtype).tolist(), strict=True):
        numerator, denominator = value.item().as_integer_ratio()
        assert numerator << 127 <= denominator << code, "code is large enough"
        assert code == 0 or numerator << 127 > denominator << (code - 1), "and no smaller one is"


@each("shape", RAGGED)
@each("square", [False, True])
@each("given", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(shape, square, given):
    """Half a step of the format at most, relative to the largest value of the block, and no block saturates."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(given)
    q, codes = lowering.quantize_mxfp8(x, E4M3, square=square)
    assert q.shape == x.shape
    assert codes.shape == reference.compact_scale_shape(*shape, square)
    rows = torch.arange(shape[0]) // (32 if square else 1)
    scale = torch.exp2(codes.double() - 127)[rows][:, torch.arange(shape[1]) // 32]
    error = (q.double() * scale - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2**-4, scale * 2**-10)).all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 9), (300, 16)])
def test_swizzled_scales_are_torchaos(shape):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    made = reference.swizzled(codes)
    assert made.shape == reference.gemm_ready_scale_shape(shape[0], 32 * shape[1])
    assert torch.equal(made.flatten(), utils.to_blocked(codes))
    assert torch.equal(reference.unswizzled(made, shape[0], 32 * shape[1]), codes)


def test_infinity_and_nan_reach_the_product():
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40] = torch.inf, torch.nan
    a, scale_a = cast([x], E4M3)
    b, scale_b = cast([torch.ones(16, 64)], E4M3)
    out = multiplied(a, b.t(), scale_a, scale_b)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isinf().all()
    assert out[2].isnan().all()


@each(("bias_dtype", "out_dtype"), list(itertools.product((None, torch.bfloat16, torch.float32), SCALED_MM)))
@each("k", [48, 96])
def test_what_cublaslt_is_given(monkeypatch, bias_dtype, out_dtype, k):
    """On a machine that says it has SM100, torch's GEMM is recorded, and computed here as its documentation describes it."""
    monkeypatch.setattr(
        hardware, "refusal", lambda gemm, device: hardware._output_refusal(gemm) or hardware._size_refusal(gemm)
    )
    called = []

    def torchs(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias=None, output_dtype=None):
        called.append(output_dtype)
        functional = torch.nn.functional
        assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == functional.SwizzleType.SWIZZLE_32_4_4
        assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
        assert a.stride(1) == 1
        assert b.stride(0) == 1
        assert a.shape[1] % 32 == 0
        scales = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
        return scaled_mm(a, b, *scales, bias, out_dtype=output_dtype)

    a, scale_a = cast([torch.randn(24, k)], E4M3)
    b, scale_b = cast([torch.randn(32, k)], E4M3)
    a, b = a[:, :k], b[:, :k]  # blockwise copies are padded to 16 alone
    bias = None if bias_dtype is None else torch.randn(32).to(bias_dtype)
    expected = scaled_mm(a, b.t(), scale_a, scale_b, bias, out_dtype=out_dtype)
    with mock.patch.object(torch.nn.functional, "scaled_mm", torchs), mock.patch.object(torch.Tensor, "is_cuda", True):
        out = by_decision(a, b.t(), scale_a, scale_b, bias, out_dtype=out_dtype)
    takes_bias = bias is None or (bias_dtype == out_dtype and out_dtype != torch.float32)
    assert called == [out_dtype if takes_bias else torch.float32]
    assert torch.equal(out, expected)


class CublasLt:
    """A stand-in for torch's function, which may take the scales' tiles for another order, or raise."""

    def __init__(self, fault: str | None) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self, a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias=None, output_dtype=None):
        self.calls += 1
        if self.fault == "raises":
            raise TypeError("another signature")
        scales = [scale.view(torch.uint8) for scale in (scale_a, scale_b)]
        if self.fault == "swizzle":
            scales[0] = scales[0].mT.reshape(scales[0].shape)
        return scaled_mm(a, b, *scales, bias, out_dtype=output_dtype)


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize(
    ("fault", "said"),
    [(None, None), ("swizzle", "its relative error is"), ("raises", "it raises TypeError: another signature")],
)
def test_cublaslt_is_trusted_after_a_trial(fault, said, dtypes, bias_dtype, monkeypatch, caplog):
    library = CublasLt(fault)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", library)
    monkeypatch.setattr(gemm.trial, "tried", {})
    monkeypatch.setattr(gemm.trial, "reasons", {})
    (a, scale_a), (b, scale_b) = (cast([torch.randn(128, 128)], dtype) for dtype in dtypes)
    operands = a, b.t(), scale_a, scale_b, None if bias_dtype is None else torch.ones(128, dtype=bias_dtype)
    require_trial(gemm.trial, Product(*operands), library, said is None)
    assert (said or "") in caplog.text
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(hardware, "refusal", lambda gemm, device: None)
    if said is None:
        assert torch.equal(by_decision(*operands), scaled_mm(*operands))
        return
    with pytest.raises(gemm.WrongGemmError, match=f"was tried here: {said}.*use the recipe 'blockwise'"):
        by_decision(*operands)


def test_blockwise_takes_tritons_gemm_where_cublaslts_is_wrong(monkeypatch):
    from lowering import paths as blockwise_by_mxfp8

    def wrong(*args, **options):
        raise gemm.WrongGemmError("its relative error is 3")

    asked = []
    monkeypatch.setattr(blockwise_by_mxfp8, "by_decision", wrong)
    instead = {"triton": lambda given: lambda a, *others: asked.append(given) or a}
    monkeypatch.setattr(blockwise_by_mxfp8, "IMPLEMENTATIONS", instead)
    a, scale = ops.cast_with_scales([torch.randn(128, 128)], E4M3, granularity="block_1x128", power_of_2=True)
    names = {"granularity_a": "block_1x128", "granularity_b": "block_1x128"}
    given = Product(a, a.t(), scale, scale, None, **names)
    assert blockwise_by_mxfp8.multiply_as_mxfp8(given) is a
    assert asked == [given]


def test_another_gpu_refuses():
    with FakeTensorMode(allow_non_fake_inputs=True):
        a, b = (torch.empty(32, 32, device="cuda", dtype=E4M3) for _ in range(2))
        scale = torch.empty(1, 1, 32, 16, device="cuda", dtype=torch.uint8)
        with (
            mock.patch.object(hardware, "cuda_capability", return_value=(9, 0)),
            pytest.raises(
                NotImplementedError, match=r"1x32 blocks need compute capability 10\.0, this device has 9\.0; blockwise"
            ),
        ):
            gemm.decided(Product(a, b.t(), scale, scale))
