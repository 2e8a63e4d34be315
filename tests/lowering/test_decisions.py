"""The implementation of a GEMM is decided once for all of a kind, and anew for each that differs in what decides."""

import logging
from typing import NamedTuple

import pytest
import torch

import lowering
from lowering import gemm as dense
from lowering import hardware, ops
from lowering.blockwise import cublaslt, deep_gemm, gemm
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import gemm as grouped_gemm
from lowering.grouped import reference as groups
from lowering.trials import Trial
from tests.lowering.deep_gemm_stand_in import Library
from tests.lowering.test_deep_gemm import install
from tests.lowering.test_rowwise import cpu_gemm_takes_rows
from tests.support.copies import both
from tests.tolerances import REFERENCE_MM, relative_error

ONE, TWO = Granularity.BLOCK_1X128.value, Granularity.BLOCK_128X128.value
M, N, K = 8, 48, 272


def moved(x, by):
    """Copy with the strides, `by` bytes behind an address that is a multiple of 16."""
    strides = x.stride()
    memory = torch.zeros(sum((s - 1) * t for s, t in zip(x.shape, strides, strict=True)) + 1 + 32, dtype=x.dtype)
    start = (-memory.data_ptr() % 16 + by) // x.element_size()
    there = memory[start:].as_strided(x.shape, strides, start)
    return there.copy_(x) if x.element_size() > 1 else there.view(torch.uint8).copy_(x.view(torch.uint8)).view(x.dtype)


def spread(x):
    """Copy to rows that are further apart."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 16, dtype=torch.uint8)[:, : x.shape[1]]
    return wide.copy_(x.view(torch.uint8)).view(x.dtype)


def arguments(m=M, n=N, dtype=E4M3, pair=(ONE, TWO), seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, scale_a = lowering.cast_blockwise(torch.randn(m, K, generator=generator), dtype, granularity=pair[0])
    b, scale_b = lowering.cast_blockwise(torch.randn(n, K, generator=generator), E4M3, granularity=pair[1])
    a, scale_a, b, scale_b = (moved(x, 0) for x in (a, scale_a, b, scale_b))
    return {
        "a": a,
        "b": b.t(),
        "scale_inv_a": scale_a,
        "scale_inv_b": scale_b,
        "granularity_a": pair[0],
        "granularity_b": pair[1],
    }


USUAL = arguments()
OTHERS = {
    "rows": arguments(m=M + 8),
    "columns": arguments(n=N + 16),
    "dtype": arguments(dtype=E5M2),
    "granularities": arguments(pair=(ONE, ONE)),
    "address of a": USUAL | {"a": moved(USUAL["a"], 1)},
    "address of b": USUAL | {"b": moved(USUAL["b"].t(), 8).t()},
    "address of scales": USUAL | {"scale_inv_a": moved(USUAL["scale_inv_a"], 4)},
    "strides": USUAL | {"a": spread(USUAL["a"])},
    "bias": USUAL | {"bias": torch.ones(N)},
    "dtype of a bias": USUAL | {"bias": torch.ones(N, dtype=torch.bfloat16)},
    "strides of a bias": USUAL | {"bias": torch.ones(2 * N)[::2]},
    "output": USUAL | {"out_dtype": torch.float32},
    "implementation": USUAL | {"implementation": "reference"},
}


@pytest.fixture
def decided(monkeypatch):
    """The arguments of each decision."""
    found = []
    decide = dense.decided
    monkeypatch.setattr(dense, "decided", lambda *args: found.append(args) or decide(*args))
    monkeypatch.setattr(dense, "DECISIONS", {})
    return found


def product(given):
    return torch.ops.lowering.scaled_mm(**given)


def expected(given):
    return dense.scaled_mm(**given)


@pytest.mark.parametrize("what", OTHERS)
def test_what_decides_is_looked_at_once(what, decided):
    other = OTHERS[what]
    for given in (USUAL, arguments(seed=1), USUAL):
        assert product(given).equal(expected(given))
    assert len(decided) == 1, "other values are of the same kind"
    for _ in range(2):
        assert product(other).equal(expected(other))
        assert product(USUAL).equal(expected(USUAL))
    assert len(decided) == 2


def test_operands_that_do_not_fit_are_refused_at_each_call(decided):
    for _ in range(2):
        with pytest.raises(ValueError, match="scale_inv_a is"):
            product(USUAL | {"scale_inv_a": torch.ones(8, 3)})
    with pytest.raises(ValueError, match=r"scale_inv_a is torch\.float64"):
        product(USUAL | {"scale_inv_a": USUAL["scale_inv_a"].double()})
    assert product(USUAL).equal(expected(USUAL))


def test_sizes_without_end_are_not_all_kept(decided, monkeypatch):
    monkeypatch.setattr("lowering.trials._MOST", 2)
    kinds = [arguments(m=m) for m in (4, 8, 12)]
    for given in (*kinds, kinds[0], kinds[0]):
        assert product(given).equal(expected(given))
    assert len(decided) == 4


@pytest.fixture
def on_gpu(monkeypatch, decided):
    """A library that stands in for DeepGEMM on tensors that say that they are on a GPU."""
    library = install(monkeypatch, Library())
    monkeypatch.setattr(cublaslt, "refusal", lambda given: "it is not asked for")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return library


def test_a_library_is_asked_once(on_gpu, monkeypatch, decided):
    asked = []
    refuse = deep_gemm.refusal
    monkeypatch.setattr(deep_gemm, "refusal", lambda given: asked.append(1) or refuse(given))
    for seed in range(3):
        given = arguments(seed=seed)
        torch.testing.assert_close(dense.by_decision(**given), expected(given), rtol=2**-7, atol=1e-3)
    assert (len(decided), len(asked)) == (1, 2)
    calls = on_gpu.calls
    dense.by_decision(**USUAL)
    assert on_gpu.calls == calls + 1


def test_nothing_is_kept_while_a_graph_is_captured(on_gpu, monkeypatch, decided):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(deep_gemm.trial, "is_passed", lambda given: not torch.cuda.is_current_stream_capturing())
    monkeypatch.setitem(gemm.IMPLEMENTATIONS, "triton", gemm.IMPLEMENTATIONS["reference"])
    for _ in range(2):  # no trial then, so no library
        assert dense.by_decision(**USUAL).equal(expected(USUAL))
    assert (len(decided), on_gpu.calls) == (2, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dense.by_decision(**USUAL)
    assert on_gpu.calls > 0


def of_lines(dtype=torch.float32, m=M, k=K, bias=None, **options):
    a, b = torch.randn(m, k).to(E4M3), torch.randn(N, k).to(E4M3).t()
    scales = {"scale_inv_a": torch.rand(m, 1), "scale_inv_b": torch.rand(N, 1)}
    return {"a": a, "b": b, "bias": bias, "out_dtype": dtype, **scales, **options}


def of_tensors(dtype=torch.float32, **options):
    scales = {"scale_inv_a": torch.rand(()), "scale_inv_b": torch.rand(())}
    return of_lines(dtype, **options) | scales


def of_mx(dtype=torch.bfloat16, m=M, k=K, bias=None):
    (a, scale_a), (b, scale_b) = (
        ops.cast_with_scales([torch.randn(rows, k)], E4M3, granularity="block_1x32") for rows in (m, N)
    )
    return {"a": a, "b": b.t(), "scale_inv_a": scale_a, "scale_inv_b": scale_b, "bias": bias, "out_dtype": dtype}


KINDS = {
    "tensor_wise": (of_tensors, [{"fast_accum": True}]),
    "row_wise": (of_lines, [{"fast_accum": True}]),
    "block_1x32": (of_mx, []),
}


@pytest.mark.skipif(not hardware.triton_available(), reason="GEMMs of tensor cores need Triton")
@pytest.mark.parametrize("kind", KINDS)
def test_what_decides_about_other_gemms_is_looked_at_once(kind, decided, monkeypatch):
    if kind == "row_wise" and not cpu_gemm_takes_rows():
        pytest.skip("torch's GEMM of CPUs takes no scale per row before 2.13")
    arguments, options = KINDS[kind]
    kinds = both(kind)
    monkeypatch.setattr(dense, "runs_kernels", lambda device: True)

    def right(given):
        out, wanted = dense.by_decision(**given, **kinds), dense.scaled_mm(**given, **kinds)
        assert (out.dtype, out.shape) == (wanted.dtype, wanted.shape)
        return relative_error(out, wanted.double()) <= REFERENCE_MM[torch.bfloat16]

    usual = arguments()
    others = [
        arguments(m=M + 4),
        arguments(k=K + 64),
        arguments(torch.float16),
        arguments(bias=torch.randn(N)),
        arguments(bias=torch.randn(N).bfloat16()),
        arguments(bias=torch.randn(2 * N)[::2]),
        usual | {"a": spread(usual["a"])},
        usual | {"b": moved(usual["b"].t(), 8).t()},
        *(arguments(**option) for option in options),
    ]
    for given in (usual, arguments(), usual):
        assert right(given)
    assert len(decided) == 1
    for i, other in enumerate(others, 2):
        assert right(other)
        scale = next(name for name in other if name.startswith("scale"))
        assert right(other | {scale: other[scale].clone()})
        assert right(usual)
        assert len(decided) == i


def test_what_decides_about_a_grouped_gemm_is_looked_at_once(monkeypatch):
    """And the function that is kept holds no tensor: others of equal layouts have products of their own."""
    found = []

    def decided(given):
        found.append(given)
        how = {name: getattr(given, name) for name in ("out_dtype", "fast_accum")}
        return "triton", lambda *operands: groups.scaled_grouped_mm(*operands, **how)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(grouped_gemm, "decided", decided)
    monkeypatch.setattr(grouped_gemm, "DECISIONS", {})

    def operands(rows=16, k=K):
        ends, scales = torch.tensor([4, 16], dtype=torch.int32), (torch.rand(()), torch.rand(2))
        return torch.randn(rows, k).to(E4M3), torch.randn(2, N, k).to(E4M3).mT, *scales, ends

    usual = operands()
    wide = torch.zeros(16, K + 64, dtype=torch.uint8).view(E4M3)[:, :K]
    others = [(operands(20), {}), (operands(k=K + 64), {}), ((wide, *usual[1:]), {}), (usual, {"out_dtype": torch.float32})]
    others += [(usual, {"fast_accum": True}), ((*usual, torch.rand(2, N)), {})]
    for i, (given, options) in enumerate([(usual, {}), *others], 1):
        for each in (given, usual if i == 1 else given):
            assert grouped_gemm.scaled_grouped_mm(*each, **options).equal(groups.scaled_grouped_mm(*each, **options))
        assert grouped_gemm.scaled_grouped_mm(*operands()).shape == (16, N)
        assert len(found) == i


class Kind(NamedTuple):
    device: torch.device


def test_a_capture_is_no_reason_after_a_trial(monkeypatch):
    kind = Kind(torch.device("cuda"))
    trial = Trial(logging.getLogger(__name__), "it", lambda gemm: kind, lambda kind: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not trial.is_passed(None)
    assert "captured" in trial.reasons[kind]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert trial.is_passed(None)
    assert trial.reasons == {}
