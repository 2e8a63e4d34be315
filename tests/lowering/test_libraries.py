"""GEMMs by cuBLASLt, CUTLASS and DeepGEMM: what they take, what they are passed, the trial before they are trusted, and the one
decision for many calls. Functions as strict as theirs stand in for them."""

import contextlib
import dataclasses
import functools
import itertools
import types
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowering
from lowering import deep_gemm as package
from lowering import gemm as dense
from lowering import hardware, paths
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
from tests.support.cases import each
from tests.support.copies import both
from tests.tolerances import SCALED_MM, relative_error

ops = torch.ops.lowering
TENSOR, ROW, MX, ONE, TWO = Granularity
PAIRS = [(ONE, TWO), (TWO, ONE), (ONE, ONE)]
E4M3S, BF16, FP32 = (E4M3, E4M3), torch.bfloat16, torch.float32


def named(pair) -> dict[str, Granularity]:
    return {"granularity_a": pair[0], "granularity_b": pair[1]}


def asked(m=8, n=48, k=272, pair=(ONE, TWO), dtypes=E4M3S, bias=None, out_dtype=BF16, device="cpu") -> Product:
    """A GEMM by blocks of 128, or of 32 of E4M3."""
    (a, scale_a), (b, scale_b) = (
        ops.cast_with_scales([torch.randn(outer, k, device=device)], dtype, granularity=kind)
        for outer, dtype, kind in zip((m, n), dtypes, pair, strict=True)
    )
    return Product(a, b.t(), scale_a, scale_b, bias, **named(pair), out_dtype=out_dtype)


def call_of(given: Product, **changes) -> dict:
    """The arguments of the operation."""
    names = ("a", "b", "scale_inv_a", "scale_inv_b", "bias", "granularity_a", "granularity_b", "out_dtype", "fast_accum")
    return {name: getattr(given, name) for name in names} | changes


def expected(given: Product) -> torch.Tensor:
    return dense.scaled_mm(**call_of(given))


GROUPS = 3


def grouped(form="rows", m=384, n=1552, k=2064, pair=(ONE, TWO), dtypes=E4M3S, bias=None, out_dtype=BF16, **options):
    """A grouped GEMM."""
    stacks = {"rows": ((), (GROUPS,)), "columns": ((), ()), "stacks": ((GROUPS,), (GROUPS,))}[form]
    copies, scales = [], []
    for outer, of_stack, dtype, kind in zip((m, n), stacks, dtypes, pair, strict=True):
        copies.append(torch.randn(*of_stack, outer, k).to(dtype))
        of_scale = (GROUPS,) if form == "columns" and kind is ROW else of_stack
        scales.append(torch.rand((*of_scale, *(() if kind is TENSOR else scale_shape(outer, k, kind)))) + 0.5)
    offs = None if form == "stacks" else torch.tensor([m // 3, m // 2, m], dtype=torch.int32)
    return GroupedGemm(copies[0], copies[1].mT, *scales, offs, bias, **named(pair), out_dtype=out_dtype, **options)


small = functools.partial(grouped, m=40, n=32, k=64, pair=(TENSOR, TENSOR), fast_accum=True)
stacks = functools.partial(grouped, "stacks", m=256, n=48, k=272)
gradients = functools.partial(grouped, "stacks", m=64, n=48, k=4096, pair=(ONE, ONE))


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


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors say that they are on a GPU, where no graph is captured."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


# -- what is refused


def replaced(given, **changes):
    return lambda: dataclasses.replace(given(), **changes)


def experts(count: int) -> torch.Tensor:
    return torch.empty(count, 32, 64, device="meta", dtype=E4M3).mT


ACCEPTED = [grouped, stacks, gradients, functools.partial(gradients, k=2048, out_dtype=FP32)]
REFUSED = [
    *((cublaslt, functools.partial(asked, **{"device": "cuda", **options}), reason) for options, reason in (
        ({"n": 24, "k": 16, "bias": torch.zeros(24)}, "N is 24, not a multiple of 16"),
        ({"m": 6, "n": 16, "k": 32, "bias": torch.zeros(16)}, None),  # any M, and a bias of float32
    )),
    *((deep_gemm, functools.partial(asked, **options), reason) for options, reason in (
        ({}, None),
        ({"pair": (ONE, ONE)}, "1x128 by 128x128"),
        ({"dtypes": (E5M2, E4M3)}, "takes only float8_e4m3fn"),
        ({"bias": torch.zeros(48)}, "no bias"),
        ({"n": 40}, "N 40"),
    )),
    *((cutlass, given, reason) for given, reason in (
        (lambda: small(fast_accum=False), "without fast accumulation"),
        (lambda: small(pair=(ONE, TWO)), "no scales per block"),
        (replaced(small, scale_inv_a=torch.ones(3)), "a scale per group"),
        (lambda: small(m=0), "a is empty"),
        (replaced(small, a=torch.zeros(40 * 64 + 1, dtype=torch.uint8)[1:].view(E4M3).view(40, 64)), "multiples of 16"),
        (replaced(small, b=experts(1024), offs=torch.empty(1024).int()), "takes 1023 groups at most, not 1024"),
        (replaced(small, b=experts(1023), offs=torch.empty(1023).int()), None),
    )),
    *((grouped_deep_gemm, given, None) for given in ACCEPTED),
    *((grouped_deep_gemm, given, reason) for given, reason in (
        (lambda: grouped("columns", m=64, n=48, k=padded_width(300, GROUPS, 128), pair=(ONE, ONE)),
         "sizes of the groups from the host"),
        (lambda: grouped(pair=(ONE, ONE)), "1x128 by 128x128 scales, not 1x128 by 1x128"),
        (lambda: grouped(m=383), "fewer than 128 rows"),
        (lambda: grouped(k=512), "copies of rows are estimated to take longer"),
        (lambda: stacks(m=200), "M 200 is not a multiple of 128"),
        (lambda: gradients(k=2048), "float32 sum is estimated to take longer"),
    )),
]  # fmt: skip


@each(("module", "given", "reason"), REFUSED)
def test_what_a_library_does_not_have_is_refused(module, given, reason, library, monkeypatch):
    with FakeTensorMode(allow_non_fake_inputs=True) if module is cublaslt else torch.no_grad(), monkeypatch.context() as patch:
        made = given()
        on_hopper(patch)
        found = module.refusal(made)
    assert found is None if reason is None else reason in found


def test_releases_of_deep_gemm_that_lack_something_are_refused(monkeypatch):
    assert "compute capability 9.0" in deep_gemm.refusal(asked())
    no_layout = types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=None)
    large_tiles = types.SimpleNamespace(**vars(no_layout), get_m_alignment_for_contiguous_layout=lambda: 256)
    for release, room, given, reason in (
        (types.SimpleNamespace(), deep_gemm, asked, "this release of deep_gemm has no fp8_gemm_nt"),
        (types.SimpleNamespace(), grouped_deep_gemm, grouped, "has no m_grouped_fp8_gemm_nt_contiguous"),
        (large_tiles, grouped_deep_gemm, grouped, "its tiles have 256 rows"),
        (None, grouped_deep_gemm, grouped, "the package deep_gemm is not installed"),
    ):
        install(monkeypatch, release)
        assert reason in room.refusal(given())


# -- what they are passed


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


@each("m", [1, 6, 132])
@each("pair", PAIRS)
@each("out_dtype", list(SCALED_MM))
def test_cublaslt_takes_any_m_any_bias_and_scales_at_any_address(m, pair, out_dtype, monkeypatch):
    """Rows are padded to four; what its epilogue does not add is added in float32 before the one rounding."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", blocks_of_torch)
    memory, given = torch.randn(96), asked(m, 48, pair=pair, out_dtype=out_dtype)
    scales = given.scale_inv_a, given.scale_inv_b
    odd_a, odd_b = (torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in scales)
    biases = None, memory[:48], memory[:48].bfloat16(), memory.half()[1:49], memory.bfloat16()[::2]
    for bias, scale_inv_a, scale_inv_b in itertools.product(biases, (scales[0], odd_a), (scales[1], odd_b)):
        product = dataclasses.replace(given, bias=bias, scale_inv_a=scale_inv_a, scale_inv_b=scale_inv_b)
        out = cublaslt.multiply(product)
        assert out.is_contiguous()
        error = relative_error(out, expected(product).double())
        assert error < SCALED_MM[out_dtype] / 10, "sums in another order, rounded once"


def mx_of_torch(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias=None, output_dtype=None, is_wrong=False):
    """torch's GEMM as its documentation describes it; wrong: it takes the scales' tiles for another order."""
    functional = torch.nn.functional
    assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
    assert swizzle_a == swizzle_b == functional.SwizzleType.SWIZZLE_32_4_4
    assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    assert (a.stride(1), b.stride(0), a.shape[1] % 32) == (1, 1, 0)
    scale_a, scale_b = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
    scale_a = scale_a.mT.reshape(scale_a.shape) if is_wrong else scale_a
    return dense.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=output_dtype, **both("block_1x32"))


@each("bias_dtype", [None, BF16, FP32])
@each("out_dtype", SCALED_MM)
def test_what_cublaslt_is_given_of_mxfp8(monkeypatch, bias_dtype, out_dtype, on_gpu):
    monkeypatch.setattr(dense, "DECISIONS", {})
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand := mock.Mock(side_effect=mx_of_torch))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", False)
        bias = None if bias_dtype is None else torch.randn(32).to(bias_dtype)
        given = asked(24, 32, 48, (MX, MX), bias=bias, out_dtype=out_dtype)
        given = dataclasses.replace(given, a=given.a[:, :48], b=given.b[:48])  # padded to 16 alone
        wanted = expected(given)
    out = dense.by_decision(**call_of(given))
    takes_bias = bias_dtype is None or (bias_dtype == out_dtype != FP32)
    assert stand.call_args.kwargs["output_dtype"] == (out_dtype if takes_bias else FP32)
    assert torch.equal(out, wanted)


@each("shape", [(3, 5, 7), (129, 257, 300), (64, 128, 512), (0, 5, 7), (5, 7, 0)])
@each("pair", PAIRS)
def test_blocks_of_128_through_mxfp8_are_the_same_number(shape, pair):
    """Bit for bit: four E8M0 scales of 32 stand for one power of two of 128, the smallest and the largest among them."""
    (m, n, k), operands = shape, []
    for outer, dtype, kind in zip((m, n), (E5M2, E4M3), pair, strict=True):
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


# -- trials


def cutlass_of_torch(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum, is_wrong=False):
    """The reference; wrong: another order of scales."""
    scale_b = scale_b.flip(-1) if is_wrong else scale_b
    if b.dim() == 3:
        out = groups.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **named((ROW, ROW)), out_dtype=out_dtype)
        if offs is not None:
            out[offs[-1] :] = torch.nan  # uninitialized memory
        return out
    # torch's own semantics of columns: groups end at `offs` in memory; scales [E * M] and [E * N].
    ends = offs.tolist()
    assert all(end % 16 == 0 for end in ends)
    scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
    parts = [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
    out = torch.stack([a[:, part].float() @ b[part].float() for part in parts]) * scale_a * scale_b
    return out.to(out_dtype)


OF_BLOCKS = zip(PAIRS, (256, 272, 256), (None, torch.zeros(16, dtype=BF16), None), SCALED_MM, strict=True)
#: Trial, a stand-in for torch's function, and GEMMs of its kinds. Scales per expert have no order along CUTLASS's columns.
TRIALS = {
    "blocks": (cublaslt.trial, blocks_of_torch,
               [asked(128, 128, k, pair, bias=bias, out_dtype=out_dtype) for pair, k, bias, out_dtype in OF_BLOCKS]),
    "blocks, scales": (cublaslt.trial, functools.partial(blocks_of_torch, spoil=reversed_scales), [asked(k=256)]),
    "mxfp8": (mx_gemm.trial, mx_of_torch, [asked(pair=(MX, MX)), asked(pair=(MX, MX), bias=torch.ones(48, dtype=BF16))]),
    "mxfp8, scales": (mx_gemm.trial, functools.partial(mx_of_torch, is_wrong=True), [asked(pair=(MX, MX))]),
    "cutlass": (cutlass.trial, cutlass_of_torch,
                [small(form, pair=(kind, TENSOR)) for form in ("rows", "columns", "stacks") for kind in (TENSOR, ROW)]),
    "cutlass, scales": (cutlass.trial, functools.partial(cutlass_of_torch, is_wrong=True),
                        [small(form, pair=(ROW, ROW)) for form in ("rows", "columns", "stacks")]),
    "deep_gemm": (deep_gemm.trial, Library(), [asked(128, 128, 256), asked()]),
    "deep_gemm, scales": (deep_gemm.trial, Library(reversed_scales), [asked(k=256)]),
    "deep_gemm in groups": (grouped_deep_gemm.trial, Library(), [made() for made in ACCEPTED]),
    "deep_gemm in groups, scales": (grouped_deep_gemm.trial, Library(reversed_scales), [made() for made in ACCEPTED]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIALS)
def test_a_library_is_trusted_after_a_trial(name, monkeypatch, caplog):
    trial, stand, kinds = TRIALS[name]
    if isinstance(stand, Library):
        install(monkeypatch, stand)
    else:
        stand = mock.Mock(side_effect=stand)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand)
        monkeypatch.setattr(torch, "_scaled_grouped_mm", stand)
    monkeypatch.setattr(trial, "tried", {})
    for given in kinds:
        require_trial(trial, given, stand, passes="," not in name)
    assert name != "deep_gemm" or stand.copies == 0, "scales are taken as they are in memory"
    texts = [record.getMessage() for record in caplog.records]
    assert bool(texts) == ("," in name)
    assert all(" not used for " in text and " is: its relative error is " in text for text in texts)


@each(
    ("error", "said"),
    [
        (RuntimeError("cuBLAS says no\nand more"), "Triton's is: it raises cuBLAS says no for M"),
        (TypeError("another signature"), "it raises TypeError: another signature"),
        (torch.AcceleratorError("an illegal memory access was encountered"), None),
    ],
)
def test_whatever_a_library_raises_is_a_refusal_with_its_text(error, said, monkeypatch, caplog):
    """But what spoils the CUDA context."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand := mock.Mock(side_effect=error))
    monkeypatch.setattr(cublaslt.trial, "tried", {})
    with contextlib.nullcontext() if said else pytest.raises(torch.AcceleratorError):
        require_trial(cublaslt.trial, asked(k=256), stand, passes=False)
        assert said in caplog.text


def test_what_takes_the_place_of_mxfp8_where_it_is_wrong(monkeypatch):
    """Nothing; that of blockwise scaling is taken by Triton's GEMM."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", functools.partial(mx_of_torch, is_wrong=True))
    monkeypatch.setattr(hardware, "refusal", lambda gemm, device: None)
    for owner, name in ((dense, "DECISIONS"), (mx_gemm.trial, "tried"), (mx_gemm.trial, "reasons")):
        monkeypatch.setattr(owner, name, {})
    given, blocks = asked(128, 128, 128, (MX, MX)), asked(pair=(ONE, ONE))
    assert not mx_gemm.trial.is_passed(given)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(mx_gemm.WrongGemmError, match=r"was tried here: its relative error is.*use the recipe 'blockwise'"):
        dense.by_decision(**call_of(given))
    monkeypatch.setattr(paths, "by_decision", mock.Mock(side_effect=mx_gemm.WrongGemmError("its relative error is 3")))
    monkeypatch.setattr(paths, "IMPLEMENTATIONS", {"triton": lambda given: lambda a, *others: a})
    assert paths.multiply_as_mxfp8(blocks) is blocks.a


# -- who computes


@each(("release", "cublaslt_is_right", "chosen"), [
    (Library(), True, "deep_gemm"), (None, True, "cublaslt"), (Library(reversed_scales), False, "triton"),
])  # fmt: skip
def test_who_computes_blocks(release, cublaslt_is_right, chosen, monkeypatch):
    """And what is said of it: the first library that passed, Triton where all that were tried failed."""
    install(monkeypatch, release)
    monkeypatch.setattr(cublaslt, "refusal", lambda given: None)
    monkeypatch.setattr(cublaslt.trial, "tried", {})
    monkeypatch.setattr(cublaslt.trial, "_fault_of", lambda kind: None if cublaslt_is_right else "it is wrong")
    given = asked()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert gemm.chosen(given) == chosen
    assert list(libraries_of(gemm.LIBRARIES, {("1x128", "128x128")}).values()) == [chosen]
    assert libraries_of(gemm.LIBRARIES, {("1x128", "1x128")}) == {}


# -- one decision for many calls


def moved(x, by, gap=0):
    """Copy to rows that are further apart by a gap, `by` bytes behind an address that is a multiple of 16."""
    width = x.shape[1] * x.element_size()
    there = torch.zeros(x.shape[0] * (width + gap) + by, dtype=torch.uint8)[by:].view(x.shape[0], -1)[:, :width]
    return there.copy_(x.contiguous().view(torch.uint8)).view(x.dtype)


def others(usual: dict) -> list[dict]:
    """Calls that differ from the usual one in what decides, each in something else."""
    odd = [{"a": moved(usual["a"], 0, gap=16)}, {"b": moved(usual["b"].t(), 8).t()}, {"a": moved(usual["a"], 1)}]
    odd += [{"scale_inv_a": moved(usual["scale_inv_a"], 4)}, {"out_dtype": torch.float16}, {"implementation": "reference"}]
    odd += [{"bias": bias} for bias in (torch.ones(48), torch.ones(48).bfloat16(), torch.ones(96)[::2])]
    sizes = [{"m": 16}, {"n": 64}, {"k": 336}, {"dtypes": (E5M2, E4M3)}, {"pair": (ONE, ONE)}]
    return [*({**usual, **changes} for changes in odd), *(call_of(asked(**changes)) for changes in sizes)]


@pytest.fixture
def decide(monkeypatch):
    """Stands in for what decides, which it does."""
    monkeypatch.setattr(dense, "decided", decide := mock.Mock(side_effect=dense.decided))
    monkeypatch.setattr(dense, "DECISIONS", {})
    return decide


def test_what_decides_is_looked_at_once(decide):
    def right(given: dict) -> bool:
        return dense.by_decision(**given).equal(dense.scaled_mm(**given))

    usual = call_of(asked())
    assert all(right(given) for given in (usual, call_of(asked()), usual))
    assert decide.call_count == 1, "other values are of the same kind"
    for i, other in enumerate(others(usual), 2):
        assert all(right(given) for given in (other, other | {"scale_inv_b": other["scale_inv_b"].clone()}, usual))
        assert decide.call_count == i


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_library_is_asked_once_and_nothing_is_kept_or_tried_in_a_capture(is_captured, library, on_gpu, monkeypatch, decide):
    trial, is_capturing = deep_gemm.trial, mock.Mock(return_value=is_captured)
    kind = dataclasses.replace(trial._kind_of(asked()), device=torch.device("cuda"))
    for name, value in (("_kind_of", lambda gemm: kind), ("_fault_of", lambda kind: None), ("reasons", {})):
        monkeypatch.setattr(trial, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    monkeypatch.setattr(cublaslt, "refusal", lambda given: "it is not asked for")
    monkeypatch.setitem(gemm.IMPLEMENTATIONS, "triton", gemm.IMPLEMENTATIONS["reference"])
    for given in (call_of(asked()) for _ in range(3)):
        torch.testing.assert_close(dense.by_decision(**given), dense.scaled_mm(**given), rtol=2**-7, atol=1e-3)
    assert (decide.call_count, library.call_count) == ((3, 0) if is_captured else (1, 3))
    assert trial.reasons.keys() == ({kind} if is_captured else set())
    is_capturing.return_value = False
    assert trial.is_passed(None)
    assert trial.reasons == {}


def test_rows_of_no_group_become_zeros(library, monkeypatch):
    from lowering.grouped import gemm_kernels as kernel

    cleared = []
    monkeypatch.setattr(kernel, "clear_rows_of_no_group", lambda out, offs: cleared.append(offs) or out)
    for given in (grouped(), stacks()):  # stacks have none
        operands = given.a, given.b, given.scale_inv_a, given.scale_inv_b, given.offs, given.bias
        grouped_gemm.prepared("deep_gemm", given)(*operands)
        assert [offs.tolist() for offs in cleared] == [grouped().offs.tolist()]


def test_a_gpu_that_cannot_says_so(monkeypatch):
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for module in (gemm, hardware):
        monkeypatch.setattr(module, "cuda_capability", lambda device: capability)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given, offs = asked(device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(NotImplementedError, match=r"A100.*\(8, 0\).*implementation='reference' emulates"):
            gemm.prepared(given, "auto")
        q, one = torch.empty(32, 32, device="cuda", dtype=E4M3), torch.ones((), device="cuda")
        with pytest.raises(NotImplementedError, match=r"compute capability 8\.9"):
            grouped_gemm.scaled_grouped_mm(q, q.expand(3, -1, -1).mT, one, one, offs)
        capability, scale = (9, 0), torch.empty(1, 1, 32, 16, device="cuda", dtype=torch.uint8)
        with pytest.raises(NotImplementedError, match=r"1x32 blocks need compute capability 10\.0, this device has 9\.0"):
            mx_gemm.decided(Product(q, q.t(), scale, scale))


def test_a_package_that_cannot_be_loaded_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(package.importlib, "import_module", mock.Mock(side_effect=ImportError("no libcudart.so.12")))
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    assert package.library.__wrapped__() is None
    assert "cannot be loaded, and is not used: no libcudart" in caplog.text
