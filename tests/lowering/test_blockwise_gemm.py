"""The blockwise GEMM: against float64 products of the same FP8 values, its dispatch and its rejections."""

import dataclasses
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowering
from lowering import hardware
from lowering.blockwise import cublaslt, gemm, reference
from lowering.formats import E4M3, E5M2, Granularity
from lowering.gemm import scaled_mm
from lowering.products import Product
from tests.lowering.deep_gemm_stand_in import require_trial
from tests.support.cases import each
from tests.tolerances import SCALED_MM, relative_error

ONE, TWO = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128
PAIRS = [(ONE, TWO), (TWO, ONE), (ONE, ONE)]
SHAPES = [(1, 1, 1), (3, 5, 7), (130, 70, 200), (129, 257, 300), (64, 128, 512)]


@pytest.mark.parametrize("pair", PAIRS)
def test_scaled_mm_takes_compact_scales(pair):
    m, n, k = 130, 260, 400
    a, scale_inv_a = lowering.quantize_blockwise(torch.randn(m, k), E4M3, pair[0].block)
    b, scale_inv_b = lowering.quantize_blockwise(torch.randn(n, k), E4M3, pair[1].block)
    out = lowering.scaled_mm(a, b.t(), scale_inv_a, scale_inv_b.t(), out_dtype=torch.float32)
    rows_a = torch.arange(m) // (1 if pair[0] is ONE else 128)
    rows_b = torch.arange(n) // (1 if pair[1] is ONE else 128)
    columns = torch.arange(k) // 128
    a64 = a.double() * scale_inv_a.double()[rows_a][:, columns]
    b64 = b.double() * scale_inv_b.double()[rows_b][:, columns]
    assert relative_error(out, a64 @ b64.t()) < SCALED_MM[torch.float32]


def test_scaled_mm_with_scalars_stays_per_tensor():
    a, b = torch.randn(5, 16).to(E4M3), torch.randn(16, 16).to(E4M3)
    for one in (torch.tensor(1.0), torch.ones(1)):
        out = lowering.scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, fast_accum=True)
        torch.testing.assert_close(out, a.float() @ b.float().t())


def test_a_gpu_without_fp8_is_refused_or_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for module in (gemm, hardware):
        monkeypatch.setattr(module, "cuda_capability", lambda device: (8, 0))
    with FakeTensorMode():
        a, b = (torch.empty(16, 128, device="cuda", dtype=E4M3) for _ in range(2))
        given = asked(a, b.t(), None, ONE, TWO, torch.bfloat16)
        with pytest.raises(NotImplementedError, match=r"A100.*\(8, 0\).*implementation='reference' emulates"):
            gemm.prepared(given, "auto")
        assert callable(gemm.prepared(given, "reference"))


def asked(a, b, bias, granularity_a, granularity_b, out_dtype) -> Product:
    """A GEMM without scales, for what asks whether it can be computed."""
    scales = torch.empty(0), torch.empty(0)
    return Product(a, b, *scales, bias, granularity_a=granularity_a, granularity_b=granularity_b, out_dtype=out_dtype)


@pytest.mark.parametrize(("m", "k", "n"), [(8, 128, 16), (132, 384, 256), (4, 1024, 128)])
@pytest.mark.parametrize("pair", PAIRS)
def test_scale_views_for_cublaslt_are_the_same_memory(m, k, n, pair):
    """As torch's v2 documents: 1x128 [outer, K/128] strides (1, outer), 128x128 [L4, outer/128] strides (1, L4)."""
    for outer, granularity in ((m, pair[0]), (n, pair[1])):
        x = torch.randn(outer, k)
        _, scale_inv = lowering.cast_blockwise(x, E4M3, granularity=granularity)
        _, compact = lowering.quantize_blockwise(x, E4M3, granularity.block)
        view = cublaslt.scale_view(scale_inv, outer, k, granularity)
        assert view.data_ptr() == scale_inv.data_ptr()
        if granularity is ONE:
            assert view.stride() == (1, outer)
            assert torch.equal(view, compact)
        else:
            padded = (k // 128 + 3) // 4 * 4
            assert view.shape == (padded, -(-outer // 128))
            assert view.stride() == (1, padded)
            assert torch.equal(view[: k // 128], compact.t())


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13), reason="older shape functions know less"
)
@pytest.mark.parametrize(("pair", "bias"), list(itertools.product(PAIRS, [False, True])))
def test_torch_accepts_what_is_passed_to_cublaslt(pair, bias, monkeypatch):
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 9))
    with FakeTensorMode():
        a, scale_inv_a = lowering.cast_blockwise(torch.empty(256, 640, device="cuda"), E4M3, granularity=pair[0])
        b, scale_inv_b = lowering.cast_blockwise(torch.empty(384, 640, device="cuda"), E4M3, granularity=pair[1])
        bias = torch.empty(384, device="cuda", dtype=torch.bfloat16) if bias else None
        assert cublaslt.refusal(asked(a, b.t(), bias, *pair, torch.bfloat16)) is None
        out = cublaslt.multiply(
            Product(
                a, b.t(), scale_inv_a, scale_inv_b, bias, granularity_a=pair[0], granularity_b=pair[1], out_dtype=torch.bfloat16
            )
        )
        assert out.shape == (256, 384)
        assert out.dtype == torch.bfloat16


E4M3S, BF16, FP32 = (E4M3, E4M3), torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("shape", "dtypes", "bias", "out_dtype", "reason"),
    [
        ((8, 24, 16), E4M3S, None, BF16, "N is 24, not a multiple of 16"),
        ((8, 16, 0), E4M3S, None, BF16, "K is 0, so there is nothing to multiply"),
        ((8, 16, 16), (E5M2, E5M2), None, BF16, "no FP8 GEMM takes two E5M2 operands"),
        ((8, 24, 16), E4M3S, FP32, BF16, "N is 24, not a multiple of 16"),
        ((6, 16, 32), E4M3S, None, BF16, None),  # any M, and a bias of float32
        ((8, 16, 32), E4M3S, FP32, BF16, None),
        ((8, 16, 32), E4M3S, FP32, FP32, None),
    ],
)
def test_cublaslt_refuses_with_a_reason(shape, dtypes, bias, out_dtype, reason, monkeypatch):
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 9))
    m, n, k = shape
    with FakeTensorMode():
        a = torch.empty(m, k, device="cuda", dtype=dtypes[0])
        b = torch.empty(n, k, device="cuda", dtype=dtypes[1]).t()
        bias = None if bias is None else torch.empty(n, device="cuda", dtype=bias)
        found = cublaslt.refusal(asked(a, b, bias, ONE, TWO, out_dtype))
        assert found is None if reason is None else reason in found


def strict_gemm(a, b, scale_a, recipe_a, scale_b, recipe_b, bias=None, output_dtype=torch.bfloat16):
    """torch's GEMM as strict as SM90's, with the reference's numbers: scales come as views of GEMM-ready memory."""
    assert a.shape[0] % 4 == a.shape[1] % 16 == b.shape[1] % 16 == 0
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert all(x.data_ptr() % 16 == 0 for x in (a, b, scale_a, scale_b)), "cuBLASLt reads 16 bytes at a time"
    assert bias is None or (bias.dtype == output_dtype != torch.float32 and bias.stride() == (1,) and bias.data_ptr() % 16 == 0)
    granularities = [{2: ONE, 4: ONE, 5: TWO}[int(recipe.value)] for recipe in (recipe_a, recipe_b)]
    memory = []
    for view, outer, inner, granularity in zip(
        (scale_a, scale_b), (a.shape[0], b.shape[1]), (a.shape[1],) * 2, granularities, strict=True
    ):
        assert view.stride(0) == 1
        memory.append(view.as_strided(reference.gemm_ready_scale_shape(outer, inner, granularity), (view.stride(1), 1)))
    scaling = {"granularity_a": granularities[0], "granularity_b": granularities[1]}
    return scaled_mm(a, b, *memory, bias, **scaling, out_dtype=output_dtype)


@each("m", [1, 3, 6, 130, 132])
@each("pair", PAIRS)
@each("out_dtype", list(SCALED_MM))
def test_cublaslt_takes_any_m_and_any_bias(m, pair, out_dtype, monkeypatch):
    """Rows are padded to four; what its epilogue does not add is added in float32 before the one rounding."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", strict_gemm)
    a, scale_inv_a = lowering.cast_blockwise(torch.randn(m, 272), E4M3, granularity=pair[0])
    b, scale_inv_b = lowering.cast_blockwise(torch.randn(48, 272), E4M3, granularity=pair[1])
    scaling = {"granularity_a": pair[0], "granularity_b": pair[1]}
    for bias in (
        None,
        torch.randn(48),
        torch.randn(48).bfloat16(),
        torch.randn(49).half()[1:],
        torch.randn(96).bfloat16()[::2],
    ):
        arguments = (a, b.t(), scale_inv_a, scale_inv_b, bias)
        out = cublaslt.multiply(Product(*arguments, **scaling, out_dtype=out_dtype))
        assert out.is_contiguous()
        expected = scaled_mm(*arguments, **scaling, out_dtype=out_dtype)
        assert relative_error(out, expected.double()) < SCALED_MM[out_dtype] / 10, "sums in another order, rounded once"


def one_byte_on(x):
    """Copy the bytes to an address that is one after a multiple of 16."""
    memory = torch.empty(x.numel() + 16, dtype=x.dtype)
    start = -memory.data_ptr() % 16 + 1
    moved = memory[start : start + x.numel()].view(x.shape)
    moved.view(torch.uint8).copy_(x.view(torch.uint8))
    assert moved.data_ptr() % 16 == 1
    return moved


@pytest.mark.parametrize("moved", ["a", "b", "neither"])
def test_cublaslt_refuses_addresses_that_it_cannot_read(moved, monkeypatch):
    monkeypatch.setattr(hardware, "refusal", lambda gemm, device: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    a, b = (torch.ones(16, 16).to(E4M3) for _ in range(2))
    a, b = (one_byte_on(x) if name == moved else x for name, x in (("a", a), ("b", b)))
    found = cublaslt.refusal(asked(a, b.t(), None, ONE, TWO, torch.bfloat16))
    assert found == (None if moved == "neither" else "the addresses of a and b are not both multiples of 16")


def test_a_view_without_memory_begins_where_it_does(monkeypatch):
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 9))
    with FakeTensorMode():
        a = torch.empty(17 * 16, device="cuda", dtype=E4M3)
        b = torch.empty(16, 16, device="cuda", dtype=E4M3).t()
        for start, is_refused in ((0, False), (1, True), (16, False)):
            view = a.as_strided((16, 16), (16, 1), start)
            reason = cublaslt.refusal(asked(view, b, None, ONE, TWO, torch.bfloat16))
            assert (reason is not None) is is_refused


@pytest.mark.parametrize("moved", ["a", "b"])
def test_scales_at_any_address(moved, monkeypatch):
    """They are small: what cuBLASLt could not read is copied."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", strict_gemm)
    a, scale_inv_a = lowering.cast_blockwise(torch.randn(8, 272), E4M3, granularity=ONE)
    b, scale_inv_b = lowering.cast_blockwise(torch.randn(48, 272), E4M3, granularity=TWO)
    scaling = {"granularity_a": ONE, "granularity_b": TWO}
    expected = scaled_mm(a, b.t(), scale_inv_a, scale_inv_b, **scaling)
    scales = {"a": scale_inv_a, "b": scale_inv_b}
    shifted = torch.empty(scales[moved].numel() + 1)[1:].view(scales[moved].shape).copy_(scales[moved])
    assert shifted.data_ptr() % 16 == 4
    scales[moved] = shifted
    out = cublaslt.multiply(Product(a, b.t(), scales["a"], scales["b"], **scaling))
    assert torch.equal(out, expected)


class Stand:
    """Stands in for cuBLASLt: the reference, with scales of a that are right, read in a wrong order, or refused."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour, self.calls = behaviour, 0

    def __call__(self, gemm):
        self.calls += 1
        if self.behaviour.startswith("raises"):
            errors = {"raises": RuntimeError, "raises a ValueError": ValueError, "raises anything": AssertionError}
            raise errors[self.behaviour]("cuBLAS says no\nand more")
        if self.behaviour == "wrong":
            gemm = dataclasses.replace(gemm, scale_inv_a=gemm.scale_inv_a.flip(0))
        return reference.multiply(gemm)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("right", None),
        ("wrong", "relative error is"),
        ("raises", "raises cuBLAS says no"),
        ("raises a ValueError", "raises cuBLAS says no"),
        ("raises anything", "raises AssertionError: cuBLAS says no"),
    ],
)
@pytest.mark.parametrize("pair", PAIRS)
def test_cublaslt_is_trusted_after_a_trial(behaviour, said, pair, monkeypatch, caplog):
    stand = Stand(behaviour)
    monkeypatch.setattr(cublaslt, "multiply", stand)
    monkeypatch.setattr(cublaslt.trial, "tried", {})
    for k, bias, out_dtype in itertools.product((256, 272), (None, torch.zeros(16, dtype=torch.bfloat16)), SCALED_MM):
        a, b = torch.empty(128, k, dtype=E4M3), torch.empty(k, 128, dtype=E4M3)
        require_trial(cublaslt.trial, asked(a, b, bias, *pair, out_dtype), stand, said is None)
    warnings = [r.getMessage() for r in caplog.records]
    assert bool(warnings) == (said is not None)
    assert all("not used for" in text and "on cpu, Triton's is" in text and (said or "") in text for text in warnings)


@each("shape", [*SHAPES, (256, 384, 640), (0, 5, 7), (5, 7, 0)])
@each("pair", PAIRS)
@each("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
def test_through_mxfp8_it_is_the_same_number(shape, pair, dtypes):
    """Bit for bit: four E8M0 scales of 32 stand for one power of two of 128, the smallest and the largest among them."""
    m, n, k = shape
    operands = []
    for outer, dtype, granularity, seed in ((m, dtypes[0], pair[0], 0), (n, dtypes[1], pair[1], 1)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(outer, k, generator=generator) * torch.exp(8 * torch.randn(outer, 1, generator=generator))
        x[:1] *= 1e-40
        x[3:4] = 3e38
        operands.append(lowering.cast_blockwise(x, dtype, granularity=granularity))
    (a, scale_inv_a), (b, scale_inv_b) = operands
    granularities = {"granularity_a": pair[0], "granularity_b": pair[1]}
    for bias, out_dtype in ((None, torch.float32), (torch.randn(n), torch.bfloat16)):
        arguments = (a, b.t(), scale_inv_a, scale_inv_b, bias)
        options = granularities | {"out_dtype": out_dtype}
        expected = lowering.scaled_mm(*arguments, **options, implementation="reference")
        out = lowering.scaled_mm(*arguments, **options, implementation="mxfp8")
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("granularity", [ONE, TWO])
def test_scales_of_128_are_four_of_32(granularity):
    from lowering.mxfp8.reference import e8m0_scales, unswizzled

    x = torch.randn(300, 520) * torch.exp2(torch.randint(-90, 90, (300, 1)))
    _, scale_inv = lowering.cast_blockwise(x, E4M3, granularity=granularity)
    _, compact = lowering.quantize_blockwise(x, E4M3, granularity.block)
    square = granularity is TWO
    turned, _ = e8m0_scales(scale_inv, scale_inv, 300, 300, 528, square_a=square, square_b=square)
    codes = unswizzled(turned, 300, 520)
    rows = torch.arange(300) // (1 if granularity is ONE else 128)
    assert torch.equal(torch.exp2(codes.double() - 127), compact.double()[rows][:, torch.arange(codes.shape[1]) // 4])


def test_mxfp8_needs_powers_of_two():
    x = torch.full((16, 128), 3.0)
    a, scale_inv = lowering.cast_blockwise(x, E4M3, granularity=ONE, power_of_2=False)
    with pytest.raises(ValueError, match=r"a scale is 0\.0066.*no power of two.*quantize with power_of_2=True"):
        lowering.scaled_mm(a, a.t(), scale_inv, scale_inv, granularity_a=ONE, granularity_b=ONE, implementation="mxfp8")
