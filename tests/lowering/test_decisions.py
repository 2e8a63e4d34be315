"""The implementation of a GEMM is decided once for all of a kind, and anew for each that differs in what decides."""

import logging
from typing import NamedTuple

import pytest
import torch

from lowering import gemm as dense
from lowering import hardware
from lowering.blockwise import cublaslt, deep_gemm, gemm
from lowering.formats import E4M3, E5M2
from lowering.grouped import gemm as grouped_gemm
from lowering.grouped import reference as groups
from lowering.trials import Trial
from tests.lowering.deep_gemm_stand_in import Library
from tests.lowering.test_gemm import cpu_gemm_takes_rows
from tests.lowering.test_libraries import install
from tests.tolerances import REFERENCE_MM, relative_error

ops = torch.ops.lowering
BLOCKS = "block_1x128", "block_128x128"
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


def operand(kind, rows, k, dtype):
    x = torch.randn(rows, k)
    if kind.startswith("block"):
        return ops.cast_with_scales([x], dtype, granularity=kind)
    return x.to(dtype), torch.rand(()) if kind == "tensor_wise" else torch.rand(rows, 1)


def arguments(kinds=BLOCKS, m=M, n=N, k=K, dtype=E4M3, **options):
    (a, scale_a), (b, scale_b) = operand(kinds[0], m, k, dtype), operand(kinds[1], n, k, E4M3)
    operands = {"a": a, "b": b.t(), "scale_inv_a": scale_a, "scale_inv_b": scale_b}
    return {**operands, "granularity_a": kinds[0], "granularity_b": kinds[1], **options}


def others(kinds, usual):
    """Calls that differ from the usual one in what decides, each in something else."""
    yield from (arguments(kinds, m=M + 8), arguments(kinds, n=N + 16), arguments(kinds, k=K + 64))
    yield from ({**usual, "bias": bias} for bias in (torch.ones(N), torch.ones(N).bfloat16(), torch.ones(2 * N)[::2]))
    yield {**usual, "out_dtype": torch.float16}
    yield {**usual, "a": spread(usual["a"])}
    yield {**usual, "b": moved(usual["b"].t(), 8).t()}
    if kinds != BLOCKS:
        yield from () if kinds[0] == "block_1x32" else [{**usual, "fast_accum": True}]
        return
    yield {**usual, "a": moved(usual["a"], 1)}
    yield {**usual, "scale_inv_a": moved(usual["scale_inv_a"], 4)}
    yield from (arguments(dtype=E5M2), arguments(("block_1x128", "block_1x128")), {**usual, "implementation": "reference"})


@pytest.fixture
def decided(monkeypatch):
    """The arguments of each decision."""
    found = []
    decide = dense.decided
    monkeypatch.setattr(dense, "decided", lambda *args: found.append(args) or decide(*args))
    monkeypatch.setattr(dense, "DECISIONS", {})
    return found


def expected(given):
    return dense.scaled_mm(**given)


@pytest.mark.skipif(not hardware.triton_available(), reason="GEMMs of tensor cores need Triton")
@pytest.mark.parametrize("kinds", [BLOCKS, *((kind, kind) for kind in ("tensor_wise", "row_wise", "block_1x32"))])
def test_what_decides_is_looked_at_once(kinds, decided, monkeypatch):
    if kinds[0] == "row_wise" and not cpu_gemm_takes_rows():
        pytest.skip("torch's GEMM of CPUs takes no scale per row before 2.13")
    monkeypatch.setattr(dense, "runs_kernels", lambda device: kinds != BLOCKS)

    def right(given):
        out, wanted = dense.by_decision(**given), expected(given)
        assert (out.dtype, out.shape) == (wanted.dtype, wanted.shape)
        return out.equal(wanted) or (kinds != BLOCKS and relative_error(out, wanted.double()) <= REFERENCE_MM[torch.bfloat16])

    usual = arguments(kinds)
    for given in (usual, arguments(kinds), usual):
        assert right(given)
    assert len(decided) == 1, "other values are of the same kind"
    for i, other in enumerate(others(kinds, usual), 2):
        assert right(other)
        assert right(other | {"scale_inv_b": other["scale_inv_b"].clone()})
        assert right(usual)
        assert len(decided) == i


def test_operands_that_do_not_fit_are_refused_at_each_call(decided):
    usual = arguments()
    for scale, text in (
        (torch.ones(8, 3), "scale_inv_a is"),
        (usual["scale_inv_a"].double(), r"scale_inv_a is torch\.float64"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                ops.scaled_mm(**usual | {"scale_inv_a": scale})
    assert ops.scaled_mm(**usual).equal(expected(usual))


def test_sizes_without_end_are_not_all_kept(decided, monkeypatch):
    monkeypatch.setattr("lowering.trials._MOST", 2)
    kinds = [arguments(m=m) for m in (4, 8, 12)]
    for given in (*kinds, kinds[0], kinds[0]):
        assert ops.scaled_mm(**given).equal(expected(given))
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
    for _ in range(3):
        given = arguments()
        torch.testing.assert_close(dense.by_decision(**given), expected(given), rtol=2**-7, atol=1e-3)
    assert (len(decided), len(asked)) == (1, 2)
    calls = on_gpu.calls
    dense.by_decision(**given)
    assert on_gpu.calls == calls + 1


def test_nothing_is_kept_while_a_graph_is_captured(on_gpu, monkeypatch, decided):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(deep_gemm.trial, "is_passed", lambda given: not torch.cuda.is_current_stream_capturing())
    monkeypatch.setitem(gemm.IMPLEMENTATIONS, "triton", gemm.IMPLEMENTATIONS["reference"])
    usual = arguments()
    for _ in range(2):  # no trial then, so no library
        assert dense.by_decision(**usual).equal(expected(usual))
    assert (len(decided), on_gpu.calls) == (2, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dense.by_decision(**usual)
    assert on_gpu.calls > 0


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
    kinds = [(operands(20), {}), (operands(k=K + 64), {}), ((wide, *usual[1:]), {}), (usual, {"out_dtype": torch.float32})]
    kinds += [(usual, {"fast_accum": True}), ((*usual, torch.rand(2, N)), {})]
    for i, (given, options) in enumerate([(usual, {}), *kinds], 1):
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
