"""GEMMs by cuBLASLt, CUTLASS and DeepGEMM: what they take, what they are passed, and the trial before they are trusted.
Functions as strict as theirs stand in for them."""

import dataclasses
import functools
import itertools
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowering
from lowering import deep_gemm as package
from lowering import gemm as dense
from lowering import hardware
from lowering.blockwise import cublaslt, deep_gemm, gemm, reference
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import cutlass
from lowering.grouped import deep_gemm as grouped_deep_gemm
from lowering.grouped import gemm as grouped_gemm
from lowering.grouped import reference as groups
from lowering.grouped.reference import GroupedGemm, padded_width
from lowering.mxfp8 import gemm as mx_gemm
from lowering.products import Product
from lowering.scaling import scale_shape
from lowering.trials import libraries_of
from tests.lowering.deep_gemm_stand_in import Library, require_trial, reversed_scales
from tests.support.cases import combinations, each
from tests.support.copies import both
from tests.tolerances import SCALED_MM, relative_error

ops = torch.ops.lowering
TENSOR, ROW, MX, ONE, TWO = Granularity
PAIRS = [(ONE, TWO), (TWO, ONE), (ONE, ONE)]
E4M3S, BF16, FP32 = (E4M3, E4M3), torch.bfloat16, torch.float32


def named(pair) -> dict[str, Granularity]:
    return {"granularity_a": pair[0], "granularity_b": pair[1]}


def asked(m=8, n=48, k=272, pair=(ONE, TWO), dtypes=E4M3S, bias=None, out_dtype=BF16, device="cpu") -> Product:
    """A GEMM by blocks."""
    (a, scale_a), (b, scale_b) = (
        lowering.cast_blockwise(torch.randn(outer, k, device=device), dtype, granularity=kind)
        for outer, dtype, kind in zip((m, n), dtypes, pair, strict=True)
    )
    return Product(a, b.t(), scale_a, scale_b, bias, **named(pair), out_dtype=out_dtype)


def expected(given: Product) -> torch.Tensor:
    operands = given.a, given.b, given.scale_inv_a, given.scale_inv_b, given.bias
    return dense.scaled_mm(*operands, **named(given.granularities), out_dtype=given.out_dtype)


GROUPS = 3


def grouped(form="rows", m=384, n=1536, k=2048, pair=(ONE, TWO), dtypes=E4M3S, bias=None, out_dtype=BF16, **options):
    """A grouped GEMM."""
    stacks = {"rows": ((), (GROUPS,)), "columns": ((), ()), "stacks": ((GROUPS,), (GROUPS,))}[form]
    copies, scales = [], []
    for outer, of_stack, dtype, kind in zip((m, n), stacks, dtypes, pair, strict=True):
        copies.append(torch.randn(*of_stack, outer, k).to(dtype))
        of_scale = (GROUPS,) if form == "columns" and kind is ROW else of_stack
        scales.append(torch.rand((*of_scale, *(() if kind is TENSOR else scale_shape(outer, k, kind)))) + 0.5)
    offs = None if form == "stacks" else torch.tensor([m // 3, m // 2, m], dtype=torch.int32)
    return GroupedGemm(copies[0], copies[1].mT, *scales, offs, bias, **named(pair), out_dtype=out_dtype, **options)


def gradients(**sizes):
    return grouped("stacks", **({"m": 64, "n": 48, "k": 4096, "pair": (ONE, ONE)} | sizes))


small = functools.partial(grouped, m=40, n=32, k=64, pair=(TENSOR, TENSOR), fast_accum=True)


@pytest.fixture
def hopper(monkeypatch):
    on_hopper(monkeypatch)


def on_hopper(monkeypatch):
    """Every device is an SM90 with Triton."""
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 9))
    monkeypatch.setattr(hardware, "triton_available", lambda: True)


def install(monkeypatch, library):
    """DeepGEMM on SM90, with the copies of rows in plain torch: the kernels that make them run on GPUs and in Triton's
    interpreter."""
    pytest.importorskip("triton")
    from lowering.grouped import column_kernels as kernels

    def padded_rows(q, scale_inv, offs):
        rows, of_rows = groups.padded_rows(q, offs, None, 128)
        factors = torch.where((rows >= 0)[:, None], scale_inv[rows.clamp(min=0)], 0.0)
        return rows, q[rows.clamp(min=0)], factors.t().contiguous().t(), torch.where(rows < 0, -1, of_rows).to(torch.int32)

    def rows_of_groups(padded, rows, num_rows):
        out = torch.full((num_rows, padded.shape[1]), torch.nan, dtype=padded.dtype)
        out[rows[rows >= 0]] = padded[rows >= 0]
        return out

    monkeypatch.setattr(kernels, "padded_rows", padded_rows)
    monkeypatch.setattr(kernels, "rows_of_groups", rows_of_groups)
    monkeypatch.setattr(package, "library", lambda: library)
    monkeypatch.setattr(package, "hardware", types.SimpleNamespace(cuda_capability=lambda device: (9, 0)))
    for room in (deep_gemm, grouped_deep_gemm):
        monkeypatch.setattr(room.trial, "tried", {})
    return library


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch, Library())


# -- what is refused


def replaced(given, **changes):
    return lambda: dataclasses.replace(given(), **changes)


def odd_bytes() -> torch.Tensor:
    return torch.zeros(40 * 64 + 1, dtype=torch.uint8)[1:].view(E4M3).view(40, 64)


def experts(count: int) -> torch.Tensor:
    return torch.empty(count, 32, 64, device="meta", dtype=E4M3).mT


REFUSED = [
    *((cublaslt, functools.partial(asked, **{"device": "cuda", **options}), reason) for options, reason in (
        ({"n": 24, "k": 16}, "N is 24, not a multiple of 16"),
        ({"n": 24, "k": 16, "bias": torch.zeros(24)}, "N is 24, not a multiple of 16"),
        ({"n": 16, "k": 0}, "K is 0, so there is nothing to multiply"),
        ({"n": 16, "k": 16, "dtypes": (E5M2, E5M2)}, "no FP8 GEMM takes two E5M2 operands"),
        ({"m": 6, "n": 16, "k": 32}, None),  # any M, and a bias of float32
        ({"n": 16, "k": 32, "bias": torch.zeros(16)}, None),
        ({"n": 16, "k": 32, "bias": torch.zeros(16), "out_dtype": FP32}, None),
    )),
    *((deep_gemm, functools.partial(asked, **options), reason) for options, reason in (
        ({"pair": (ONE, ONE)}, "1x128 by 128x128"),
        ({"pair": (TWO, ONE)}, "1x128 by 128x128"),
        ({"dtypes": (E5M2, E4M3)}, "takes only float8_e4m3fn"),
        ({"bias": torch.zeros(48)}, "no bias"),
        ({"out_dtype": FP32}, "gives bfloat16"),
        ({"n": 40}, "N 40"),
        ({"m": 0}, "M is 0"),
    )),
    *((cutlass, given, reason) for given, reason in (
        (lambda: small(fast_accum=False), "without fast accumulation"),
        (lambda: small(out_dtype=FP32), "gives bfloat16"),
        (lambda: small(dtypes=(E5M2, E4M3)), "takes only float8_e4m3fn"),
        (lambda: small(pair=(ONE, TWO)), "no scales per block"),
        (replaced(small, scale_inv_a=torch.ones(3)), "a scale per group"),
        (replaced(small, b=torch.zeros(64, 32).to(E4M3)), "column-major"),
        (lambda: small(m=0), "a is empty"),
        (lambda: small(k=24), "K is 24"),
        (lambda: dataclasses.replace(small(), b=small().b.contiguous()), "column-major"),
        (replaced(small, a=odd_bytes()), "multiples of 16"),
        (replaced(small, b=experts(1024), offs=torch.empty(1024).int()), "takes 1023 groups at most, not 1024"),
        (replaced(small, b=experts(1023), offs=torch.empty(1023).int()), None),
    )),
    *((grouped_deep_gemm, given, reason) for given, reason in (
        (lambda: grouped("columns", m=64, n=48, k=padded_width(300, GROUPS, 128), pair=(ONE, ONE)),
         "sizes of the groups from the host"),
        (lambda: grouped(pair=(ONE, ONE)), "1x128 by 128x128 scales, not 1x128 by 1x128"),
        (lambda: grouped(pair=(TENSOR, TENSOR)), "not tensor-wise by tensor-wise"),
        (lambda: grouped(dtypes=(E5M2, E4M3)), "takes only float8_e4m3fn"),
        (lambda: grouped(bias=torch.zeros(GROUPS, 1536)), "no bias"),
        (lambda: grouped(out_dtype=FP32), "gives bfloat16"),
        (lambda: grouped(m=383), "fewer than 128 rows"),
        (lambda: grouped(k=512), "copies of rows are estimated to take longer"),
        (lambda: grouped(n=1544), "N 1544 and K 2048 are not multiples of 16"),
        (lambda: grouped("stacks", m=200, n=48, k=272), "M 200 is not a multiple of 128"),
        (lambda: gradients(k=2048), "float32 sum is estimated to take longer"),
        (lambda: gradients(k=4112), "K 4112 is not a multiple of 128"),
        (lambda: gradients(n=46), "M 64 and N 46 are not multiples of 4"),
    )),
]  # fmt: skip


@each(("module", "given", "reason"), REFUSED)
def test_what_a_library_does_not_have_is_refused(module, given, reason, library, monkeypatch):
    with FakeTensorMode(allow_non_fake_inputs=True) if module is cublaslt else torch.no_grad(), monkeypatch.context() as patch:
        made = given()
        on_hopper(patch)
        found = module.refusal(made)
    assert found is None if reason is None else reason in found


def test_what_is_told_to_use_a_library_raises(library):
    with pytest.raises(ValueError, match=r"DeepGEMM cannot compute this blockwise GEMM.*use implementation='triton'"):
        gemm.prepared(asked(n=40), "deep_gemm")


def test_a_gpu_that_cannot_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    capability = (8, 0)
    for module in (gemm, hardware):
        monkeypatch.setattr(module, "cuda_capability", lambda device: capability)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given, (a, b), one = asked(device="cuda"), fp8_on_gpu(), torch.ones((), device="cuda")
        with pytest.raises(NotImplementedError, match=r"A100.*\(8, 0\).*implementation='reference' emulates"):
            gemm.prepared(given, "auto")
        assert callable(gemm.prepared(given, "reference"))
        offs = torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(NotImplementedError, match=r"compute capability 8\.9"):
            grouped_gemm.scaled_grouped_mm(a, b.expand(3, -1, -1).mT, one, one, offs)
        capability = (9, 0)
        scale = torch.empty(1, 1, 32, 16, device="cuda", dtype=torch.uint8)
        text = r"1x32 blocks need compute capability 10\.0, this device has 9\.0; blockwise"
        with pytest.raises(NotImplementedError, match=text):
            mx_gemm.decided(Product(a, b.t(), scale, scale))


def fp8_on_gpu() -> list[torch.Tensor]:
    return [torch.empty(32, 32, device="cuda", dtype=E4M3) for _ in range(2)]


def test_cublaslt_refuses_addresses_that_it_cannot_read(monkeypatch):
    memory = torch.zeros(33 * 16, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    even, odd = (memory[start + i :][:256].view(E4M3).view(16, 16) for i in (0, 1))
    given = asked(16, 16, 16)
    monkeypatch.setattr(hardware, "refusal", lambda gemm, device: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for a, b, reason in (
        (odd, even, "the addresses of a and b are not both multiples of 16"),
        (even, odd, "the addresses of a and b are not both multiples of 16"),
        (even, even, None),
    ):
        assert cublaslt.refusal(dataclasses.replace(given, a=a, b=b.t())) == reason


def test_a_view_without_memory_begins_where_it_does(hopper):
    with FakeTensorMode():
        a = torch.empty(17 * 16, device="cuda", dtype=E4M3)
        b = torch.empty(16, 16, device="cuda", dtype=E4M3).t()
        for start, is_refused in ((0, False), (1, True), (16, False)):
            given = Product(
                a.as_strided((16, 16), (16, 1), start), b, torch.empty(0), torch.empty(0), None, **named((ONE, TWO))
            )
            assert (cublaslt.refusal(given) is not None) is is_refused


def test_releases_of_deep_gemm_that_lack_something_are_refused(monkeypatch):
    one, rows = asked(), grouped()
    assert "compute capability 9.0" in deep_gemm.refusal(one)
    install(monkeypatch, types.SimpleNamespace())
    assert deep_gemm.refusal(one) == "this release of deep_gemm has no fp8_gemm_nt"
    assert grouped_deep_gemm.refusal(rows) == "this release of deep_gemm has no m_grouped_fp8_gemm_nt_contiguous"
    assert grouped_deep_gemm.refusal(gradients()) == "this release of deep_gemm has no k_grouped_fp8_gemm_nt_contiguous"
    install(monkeypatch, types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=None))
    assert "does not say where groups have to begin" in grouped_deep_gemm.refusal(rows)
    for alignment, reason in ((256, "its tiles have 256 rows, and groups begin at multiples of 128"), (64, None)):
        older = {"get_m_alignment_for_contiguous_layout": lambda alignment=alignment: alignment}
        install(monkeypatch, types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=None, **older))
        assert grouped_deep_gemm.refusal(rows) == reason
    install(monkeypatch, None)
    for room, given in ((deep_gemm, one), (grouped_deep_gemm, rows)):
        assert room.refusal(given) == "the package deep_gemm is not installed"


def test_a_package_that_cannot_be_loaded_is_not_used(monkeypatch, caplog):
    def broken(name):
        raise ImportError("libcudart.so.12: cannot open shared object file")

    package.library.cache_clear()
    monkeypatch.setattr(package.importlib, "import_module", broken)
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    try:
        assert package.library() is None
    finally:
        package.library.cache_clear()
    assert "cannot be loaded, and is not used: libcudart" in caplog.text


# -- what they are passed


@each(("m", "k", "n"), [(8, 128, 16), (132, 384, 256), (4, 1024, 128)])
@each("granularity", [ONE, TWO])
def test_scale_views_for_cublaslt_are_the_same_memory(m, k, n, granularity):
    """As torch's v2 documents: 1x128 [outer, K/128] strides (1, outer), 128x128 [L4, outer/128] strides (1, L4)."""
    for outer in (m, n):
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


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older shape functions know less")
@each("pair", PAIRS)
@each("bias", [False, True])
def test_torch_accepts_blocks_for_cublaslt(pair, bias, hopper):
    with FakeTensorMode():
        bias = torch.empty(384, device="cuda", dtype=BF16) if bias else None
        given = asked(256, 384, 640, pair, bias=bias, device="cuda")
        assert cublaslt.refusal(given) is None
        out = cublaslt.multiply(given)
    assert out.shape == (256, 384)
    assert out.dtype == BF16


@each("pair", [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR)])
@each("form", ["rows", "columns", "stacks"])
def test_torch_accepts_groups_for_cutlass(pair, form, hopper):
    """Its own checks, which its shape function repeats."""
    with torch.device("meta"):
        given = small(form, pair=pair)
    assert cutlass.refusal(given) is None
    out = cutlass.scaled_grouped_mm(given)
    assert out.shape == ((40, 32) if form == "rows" else (3, 40, 32))
    assert out.dtype == BF16


def blocks_of_torch(a, b, scale_a, recipe_a, scale_b, recipe_b, bias=None, output_dtype=BF16, spoil=lambda scale: scale):
    """torch's GEMM as strict as SM90's, with the reference's numbers: scales come as views of GEMM-ready memory."""
    assert a.shape[0] % 4 == a.shape[1] % 16 == b.shape[1] % 16 == 0
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert all(x.data_ptr() % 16 == 0 for x in (a, b, scale_a, scale_b)), "cuBLASLt reads 16 bytes at a time"
    assert bias is None or (bias.dtype == output_dtype != FP32 and bias.stride() == (1,) and bias.data_ptr() % 16 == 0)
    pair = [{2: ONE, 4: ONE, 5: TWO}[int(recipe.value)] for recipe in (recipe_a, recipe_b)]
    memory = []
    for view, outer, kind in zip((scale_a, scale_b), (a.shape[0], b.shape[1]), pair, strict=True):
        assert view.stride(0) == 1
        memory.append(view.as_strided(reference.gemm_ready_scale_shape(outer, a.shape[1], kind), (view.stride(1), 1)))
    return dense.scaled_mm(a, b, spoil(memory[0]), memory[1], bias, **named(pair), out_dtype=output_dtype)


@each("m", [1, 3, 6, 130, 132])
@each("pair", PAIRS)
@each("out_dtype", list(SCALED_MM))
def test_cublaslt_takes_any_m_and_any_bias(m, pair, out_dtype, monkeypatch):
    """Rows are padded to four; what its epilogue does not add is added in float32 before the one rounding."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", blocks_of_torch)
    memory = torch.randn(96)
    given = asked(m, 48, pair=pair, out_dtype=out_dtype)
    for bias in (None, memory[:48], memory[:48].bfloat16(), memory.half()[1:49], memory.bfloat16()[::2]):
        product = dataclasses.replace(given, bias=bias)
        out = cublaslt.multiply(product)
        assert out.is_contiguous()
        error = relative_error(out, expected(product).double())
        assert error < SCALED_MM[out_dtype] / 10, "sums in another order, rounded once"


@pytest.mark.parametrize("moved", ["scale_inv_a", "scale_inv_b"])
def test_scales_at_any_address(moved, monkeypatch):
    """They are small: what cuBLASLt could not read is copied."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", blocks_of_torch)
    given = asked()
    scale = getattr(given, moved)
    shifted = torch.empty(scale.numel() + 1)[1:].view(scale.shape).copy_(scale)
    assert shifted.data_ptr() % 16 == 4
    assert torch.equal(cublaslt.multiply(dataclasses.replace(given, **{moved: shifted})), expected(given))


def mx_of_torch(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias=None, output_dtype=None, is_wrong=False):
    """torch's GEMM as its documentation describes it; wrong: it takes the scales' tiles for another order."""
    functional = torch.nn.functional
    assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
    assert swizzle_a == swizzle_b == functional.SwizzleType.SWIZZLE_32_4_4
    assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    assert a.stride(1) == 1
    assert b.stride(0) == 1
    assert a.shape[1] % 32 == 0
    scale_a, scale_b = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
    scale_a = scale_a.mT.reshape(scale_a.shape) if is_wrong else scale_a
    return dense.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=output_dtype, **both("block_1x32"))


def mx_operands(m: int, n: int, k: int, dtypes=E4M3S) -> tuple[torch.Tensor, ...]:
    (a, scale_a), (b, scale_b) = (
        ops.cast_with_scales([torch.randn(rows, k)], dtype, granularity="block_1x32")
        for rows, dtype in zip((m, n), dtypes, strict=True)
    )
    return a, b.t(), scale_a, scale_b


@each(("bias_dtype", "out_dtype"), list(itertools.product((None, BF16, FP32), SCALED_MM)))
@each("k", [48, 96])
def test_what_cublaslt_is_given_of_mxfp8(monkeypatch, bias_dtype, out_dtype, k):
    """On a machine that says it has SM100."""
    monkeypatch.setattr(dense, "DECISIONS", {})
    stand = Stand(mx_of_torch)
    a, b, *scales = mx_operands(24, 32, k)
    operands = a[:, :k], b[:k], *scales, None if bias_dtype is None else torch.randn(32).to(bias_dtype)  # padded to 16 alone
    options = {"out_dtype": out_dtype, **both("block_1x32")}
    wanted = dense.scaled_mm(*operands, **options)
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "refusal", lambda g, device: hardware._output_refusal(g) or hardware._size_refusal(g))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.nn.functional, "scaled_mm", stand)
        patch.setattr(torch.Tensor, "is_cuda", True)
        out = dense.by_decision(*operands, **options)
    takes_bias = bias_dtype is None or (bias_dtype == out_dtype != FP32)
    assert [given["output_dtype"] for given in stand.options] == [out_dtype if takes_bias else FP32]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("sizes", [(8, 48, 272), (1, 16, 16), (130, 272, 656), (256, 384, 640), (3, 400, 128)])
def test_deep_gemm_gets_its_layouts_and_computes_the_reference(sizes, library):
    given = asked(*sizes)
    assert deep_gemm.refusal(given) is None
    out, wanted = deep_gemm.multiply(given), expected(given)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-5 * wanted.abs().max().item())
    assert library.copies == 0, "the scales of a are taken as they are in memory"


ACCEPTED = {
    "rows": grouped,
    "rows, K and N ragged": lambda: grouped(n=1552, k=2064),
    "stacks": lambda: grouped("stacks", m=256, n=48, k=272),
    "gradients": gradients,
    "gradients to float32": lambda: gradients(k=2048, out_dtype=FP32),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_grouped_deep_gemm_gets_its_layouts_and_computes_the_reference(name, library):
    given = ACCEPTED[name]()
    assert grouped_deep_gemm.refusal(given) is None
    out, wanted = grouped_deep_gemm.scaled_grouped_mm(given), groups.scaled_grouped_mm(**vars(given))
    assert out.shape == wanted.shape
    assert library.calls == 1
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-4 * wanted.abs().max().item())


def test_deep_gemm_is_called_with_the_device_of_its_tensors(monkeypatch):
    """It launches on the current device, whichever that is."""
    current, seen = [0], []

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *raised):
            current[0] = self.before

    install(monkeypatch, types.SimpleNamespace(fp8_gemm_nt=lambda *args: seen.append((current[0], args))))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    for index in (0, 1):
        package.call("fp8_gemm_nt", torch.device("cuda", index), index)
    assert seen == [(0, (0,)), (1, (1,))]
    assert current == [0]


def cutlass_of_torch(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum, fault=None):
    """The reference, with a wrong order of scales, or without zeros for empty groups."""
    scale_b = scale_b.flip(-1) if fault == "scales" else scale_b
    if b.dim() == 3:
        out = groups.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **named(("row_wise", "row_wise")), out_dtype=out_dtype)
        if offs is not None:
            out[offs[-1] :] = torch.nan  # uninitialized memory
        return out
    # torch's own semantics of columns: groups end at `offs` in memory; scales [E * M] and [E * N].
    ends = offs.tolist()
    assert all(end % 16 == 0 for end in ends)
    scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
    parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    out = torch.stack([a[:, part].float() @ b[part].float() for part in parts]) * scale_a * scale_b
    if fault == "zeros":
        out[[part.start == part.stop for part in parts]] = torch.nan
    return out.to(out_dtype)


@pytest.mark.parametrize("pair", [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR)])
def test_columns_by_cutlass_equal_the_reference(pair, monkeypatch):
    """Groups at padded offsets, one of them empty; columnwise copies as the casts write them."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", cutlass_of_torch)
    offs = torch.tensor([5, 5, 40, 57], dtype=torch.int32)
    copies = []
    for kind, cols in zip(pair, (48, 32), strict=True):
        x = torch.randn(60, cols)
        if kind is ROW:
            copies.append(groups.cast_columns(x, E4M3, offs, granularity="row_wise"))
        else:
            copies.append((groups.transposed_copy((x * 8).to(E4M3), offs), torch.tensor(1 / 8)))
    (a, scale_a), (b, scale_b) = copies
    operands = a, b.mT, scale_a, scale_b, offs
    wanted = groups.scaled_grouped_mm(*operands, **named(pair))
    found = cutlass.scaled_grouped_mm(GroupedGemm(*operands, **named(pair), fast_accum=True))
    assert found.shape == wanted.shape
    assert (found[1] == 0).all()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


# -- trials


class Stand:
    """Stands in for a function of a library: computes, or raises an error; keeps the options of its calls."""

    def __init__(self, compute=None, error=None):
        self.compute, self.error, self.options = compute, error, []

    calls = property(lambda self: len(self.options))

    def __call__(self, *args, **options):
        self.options.append(options)
        if self.error is not None:
            raise self.error
        return self.compute(*args, **options)


def of_blocks(fault):
    options = combinations(PAIRS, (256, 272), (None, torch.zeros(16, dtype=BF16)), list(SCALED_MM))
    spoil = reversed_scales if fault else lambda scale: scale
    given = [asked(128, 128, k, pair, bias=bias, out_dtype=out_dtype) for pair, k, bias, out_dtype in options]
    return cublaslt.trial, (torch.nn.functional, "scaled_mm"), functools.partial(blocks_of_torch, spoil=spoil), given


def of_mx(fault):
    given = [
        Product(*mx_operands(128, 128, 128, dtypes), bias)
        for dtypes in (E4M3S, (E5M2, E4M3))
        for bias in (None, torch.ones(128, dtype=BF16))
    ]
    return mx_gemm.trial, (torch.nn.functional, "scaled_mm"), functools.partial(mx_of_torch, is_wrong=bool(fault)), given


def of_cutlass(fault):
    """Scales per expert have no order along its columns."""
    pairs = [(ROW, ROW)] if fault == "scales" else [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR)]
    forms = ["columns"] if fault == "zeros" else ["rows", "columns", "stacks"]
    given = [small(form, pair=pair) for pair in pairs for form in forms]
    return cutlass.trial, (torch, "_scaled_grouped_mm"), functools.partial(cutlass_of_torch, fault=fault), given


def of_deep_gemm(fault):
    return deep_gemm.trial, None, None, [asked(k=256)]


def of_grouped_deep_gemm(fault):
    return grouped_deep_gemm.trial, None, None, [made() for made in ACCEPTED.values()]


@pytest.mark.parametrize(
    ("of", "fault"),
    [
        *itertools.product((of_blocks, of_mx, of_cutlass, of_deep_gemm, of_grouped_deep_gemm), (None, "scales")),
        (of_cutlass, "zeros"),
    ],
)
def test_a_library_is_trusted_after_a_trial(of, fault, monkeypatch, caplog):
    trial, place, compute, kinds = of(fault)
    if place is None:
        stand = install(monkeypatch, Library(reversed_scales) if fault else Library())
    else:
        stand = Stand(compute)
        monkeypatch.setattr(*place, stand)
    monkeypatch.setattr(trial, "tried", {})
    for given in kinds:
        require_trial(trial, given, stand, fault is None)
    texts = [record.getMessage() for record in caplog.records]
    assert bool(texts) == (fault is not None)
    assert all(" not used for " in text and " is: its relative error is " in text for text in texts)


@each(
    ("error", "said"),
    [
        (RuntimeError("cuBLAS says no\nand more"), "Triton's is: it raises cuBLAS says no for M"),
        (ValueError("cuBLAS says no"), "Triton's is: it raises cuBLAS says no for M"),
        (AssertionError("CUDA_HOME"), "it raises AssertionError: CUDA_HOME"),
        (TypeError("another signature"), "it raises TypeError: another signature"),
        (KeyError("x"), "it raises KeyError: 'x'"),
    ],
)
def test_whatever_a_library_raises_is_a_refusal_with_its_text(error, said, monkeypatch, caplog):
    for room, stand in ((cublaslt, Stand(error=error)), (deep_gemm, Stand(error=error))):
        install(monkeypatch, types.SimpleNamespace(fp8_gemm_nt=stand))
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand)
        monkeypatch.setattr(room.trial, "tried", {})
        caplog.clear()
        require_trial(room.trial, asked(k=256), stand, passes=False)
        assert said in caplog.text


def test_an_error_that_spoils_the_context_is_none(monkeypatch):
    error = torch.AcceleratorError("an illegal memory access was encountered")
    install(monkeypatch, types.SimpleNamespace(fp8_gemm_nt=Stand(error=error)))
    with pytest.raises(torch.AcceleratorError):
        deep_gemm.trial.is_passed(asked(k=256))


@pytest.mark.parametrize(
    ("stand", "said"),
    [
        (Stand(mx_of_torch), None),
        (Stand(functools.partial(mx_of_torch, is_wrong=True)), "its relative error is"),
        (Stand(error=TypeError("another signature")), "it raises TypeError: another signature"),
    ],
    ids=["right", "wrong", "raises"],
)
def test_nothing_takes_the_place_of_mxfp8_where_it_is_wrong(stand, said, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hardware, "refusal", lambda gemm, device: None)
    for owner, name in ((dense, "DECISIONS"), (mx_gemm.trial, "tried"), (mx_gemm.trial, "reasons")):
        monkeypatch.setattr(owner, name, {})
    operands, kinds = mx_operands(128, 128, 128), both("block_1x32")
    assert mx_gemm.trial.is_passed(Product(*operands)) is (said is None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    if said is None:
        assert torch.equal(dense.by_decision(*operands, **kinds), dense.scaled_mm(*operands, **kinds))
        return
    with pytest.raises(mx_gemm.WrongGemmError, match=f"was tried here: {said}.*use the recipe 'blockwise'"):
        dense.by_decision(*operands, **kinds)


def test_blockwise_takes_tritons_gemm_where_that_of_mxfp8_is_wrong(monkeypatch):
    from lowering import paths as blockwise_by_mxfp8

    def wrong(*args, **options):
        raise mx_gemm.WrongGemmError("its relative error is 3")

    given, seen = asked(pair=(ONE, ONE)), []
    monkeypatch.setattr(blockwise_by_mxfp8, "by_decision", wrong)
    instead = {"triton": lambda given: lambda a, *others: seen.append(given) or a}
    monkeypatch.setattr(blockwise_by_mxfp8, "IMPLEMENTATIONS", instead)
    assert blockwise_by_mxfp8.multiply_as_mxfp8(given) is given.a
    assert seen == [given]


@each("shape", [(1, 1, 1), (3, 5, 7), (130, 70, 200), (129, 257, 300), (64, 128, 512), (256, 384, 640), (0, 5, 7), (5, 7, 0)])
@each("pair", PAIRS)
@each("dtypes", [E4M3S, (E5M2, E4M3)])
def test_blocks_of_128_through_mxfp8_are_the_same_number(shape, pair, dtypes):
    """Bit for bit: four E8M0 scales of 32 stand for one power of two of 128, the smallest and the largest among them."""
    m, n, k = shape
    operands = []
    for outer, dtype, kind in zip((m, n), dtypes, pair, strict=True):
        x = torch.randn(outer, k) * torch.exp(8 * torch.randn(outer, 1))
        x[:1] *= 1e-40
        x[3:4] = 3e38
        operands.append(lowering.cast_blockwise(x, dtype, granularity=kind))
    (a, scale_a), (b, scale_b) = operands
    for bias, out_dtype in ((None, FP32), (torch.randn(n), BF16)):
        out, wanted = (
            lowering.scaled_mm(a, b.t(), scale_a, scale_b, bias, **named(pair), out_dtype=out_dtype, implementation=name)
            for name in ("mxfp8", "reference")
        )
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def test_mxfp8_needs_powers_of_two():
    a, scale_inv = lowering.cast_blockwise(torch.full((16, 128), 3.0), E4M3, granularity=ONE, power_of_2=False)
    with pytest.raises(ValueError, match=r"a scale is 0\.0066.*no power of two.*quantize with power_of_2=True"):
        lowering.scaled_mm(a, a.t(), scale_inv, scale_inv, **named((ONE, ONE)), implementation="mxfp8")


# -- who computes


@pytest.mark.parametrize(
    ("deep_gemm_is", "cublaslt_is", "chosen"),
    [
        ("right", "right", "deep_gemm"),
        ("wrong", "right", "cublaslt"),
        ("absent", "right", "cublaslt"),
        ("wrong", "wrong", "triton"),
    ],
)
def test_who_computes_blocks(deep_gemm_is, cublaslt_is, chosen, monkeypatch):
    """And what is said of it: the first library that passed, Triton where all that were tried failed."""
    install(monkeypatch, {"right": Library(), "wrong": Library(reversed_scales), "absent": None}[deep_gemm_is])
    monkeypatch.setattr(cublaslt, "refusal", lambda given: None)
    monkeypatch.setattr(cublaslt.trial, "tried", {})
    monkeypatch.setattr(cublaslt.trial, "_fault_of", lambda kind: None if cublaslt_is == "right" else "it is wrong")
    given = asked()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert gemm.chosen(given) == chosen
    assert list(libraries_of(gemm.LIBRARIES, {("1x128", "128x128")}).values()) == [chosen]
    assert libraries_of(gemm.LIBRARIES, {("1x128", "1x128")}) == {}


def test_who_computes_groups_by_blocks(library, hopper, monkeypatch):
    """CUTLASS has no blocks; without the package Triton computes them, too."""
    monkeypatch.setattr(cutlass.trial, "tried", {})
    assert grouped_gemm.chosen(grouped()) == "deep_gemm"
    install(monkeypatch, Library(reversed_scales))
    assert grouped_gemm.chosen(grouped()) == "triton"
    kind = "1x128 by 128x128 scales of rows in groups on cpu"
    assert libraries_of(grouped_gemm.LIBRARIES) == {kind: "triton"}
    assert libraries_of(grouped_gemm.LIBRARIES, {("1x128", "128x128")}) == {kind: "triton"}
    assert libraries_of(grouped_gemm.LIBRARIES, {("row-wise", "row-wise")}) == {}
    install(monkeypatch, None)
    assert grouped_gemm.chosen(grouped()) == "triton"
    assert libraries_of(grouped_gemm.LIBRARIES) == {}


def test_rows_of_no_group_become_zeros(library, monkeypatch):
    from lowering.grouped import gemm_kernels as kernel

    cleared = []
    monkeypatch.setattr(kernel, "clear_rows_of_no_group", lambda out, offs: cleared.append(offs) or out)
    for given in (grouped(), ACCEPTED["stacks"]()):  # stacks have none
        operands = given.a, given.b, given.scale_inv_a, given.scale_inv_b, given.offs, given.bias
        grouped_gemm.prepared("deep_gemm", given)(*operands)
        assert len(cleared) == 1
    assert cleared[0].tolist() == grouped().offs.tolist()
