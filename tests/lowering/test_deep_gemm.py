"""Blockwise GEMMs by DeepGEMM, for which a module with its signatures stands in."""

import types

import pytest
import torch

import lowering
from lowering import deep_gemm as package
from lowering.blockwise import cublaslt, deep_gemm, gemm
from lowering.formats import E4M3, E5M2, Granularity
from lowering.gemm import scaled_mm
from lowering.products import Product
from lowering.trials import libraries_of
from tests.lowering.deep_gemm_stand_in import Library, require_trial, reversed_scales

ONE, TWO = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128


def operand(outer, inner, granularity, dtype=E4M3):
    return lowering.cast_blockwise(torch.randn(outer, inner), dtype, granularity=granularity.value)


def asked(m=8, n=48, k=272, pair=(ONE, TWO), dtypes=(E4M3, E4M3), bias=None, out_dtype=torch.bfloat16):
    (a, scale_inv_a), (b, scale_inv_b) = operand(m, k, pair[0], dtypes[0]), operand(n, k, pair[1], dtypes[1])
    scaling = {"granularity_a": pair[0].value, "granularity_b": pair[1].value}
    return Product(a, b.t(), scale_inv_a, scale_inv_b, bias, **scaling, out_dtype=out_dtype)


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch, Library())


def install(monkeypatch, library):
    monkeypatch.setattr(package, "library", lambda: library)
    monkeypatch.setattr(package, "hardware", types.SimpleNamespace(cuda_capability=lambda device: (9, 0)))
    monkeypatch.setattr(deep_gemm.trial, "tried", {})
    return library


@pytest.mark.parametrize("sizes", [(8, 48, 272), (1, 16, 16), (130, 272, 656), (256, 384, 640), (3, 400, 128)])
def test_it_gets_its_layouts_and_computes_the_reference(sizes, library):
    given = asked(*sizes)
    assert deep_gemm.refusal(given) is None
    out = deep_gemm.multiply(given)
    operands, (kind_a, kind_b) = (given.a, given.b, given.scale_inv_a, given.scale_inv_b), given.granularities
    expected = scaled_mm(*operands, granularity_a=kind_a, granularity_b=kind_b)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5 * expected.abs().max().item())
    assert library.copies == 0, "the scales of a are taken as they are in memory"


def refused():
    yield asked(pair=(ONE, ONE)), "1x128 by 128x128"
    yield asked(pair=(TWO, ONE)), "1x128 by 128x128"
    yield asked(dtypes=(E5M2, E4M3)), "takes only float8_e4m3fn"
    yield asked(bias=torch.zeros(48)), "no bias"
    yield asked(out_dtype=torch.float32), "gives bfloat16"
    yield asked(n=40), "N 40"
    yield asked(m=0), "M is 0"


@pytest.mark.parametrize(("given", "reason"), list(refused()))
def test_what_it_does_not_have_is_refused(given, reason, library):
    assert reason in deep_gemm.refusal(given)
    with pytest.raises(ValueError, match=r"DeepGEMM cannot compute this blockwise GEMM.*use implementation='triton'"):
        gemm.prepared(given, "deep_gemm")


def test_without_the_package_or_the_device_it_is_refused(monkeypatch):
    given = asked()
    assert "compute capability 9.0" in deep_gemm.refusal(given)
    install(monkeypatch, None)
    assert deep_gemm.refusal(given) == "the package deep_gemm is not installed"
    install(monkeypatch, types.SimpleNamespace())
    assert deep_gemm.refusal(given) == "this release of deep_gemm has no fp8_gemm_nt"


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


@pytest.mark.parametrize("spoil", [None, reversed_scales])
def test_it_is_trusted_after_a_trial(spoil, monkeypatch, caplog):
    library = install(monkeypatch, Library() if spoil is None else Library(spoil))
    require_trial(deep_gemm.trial, asked(k=256), library, spoil is None)
    assert ("torch's or Triton's is: its relative error" in caplog.text) == (spoil is not None)


@pytest.mark.parametrize(
    ("deep_gemm_is", "cublaslt_is", "chosen"),
    [
        ("right", "right", "deep_gemm"),
        ("wrong", "right", "cublaslt"),
        ("absent", "right", "cublaslt"),
        ("wrong", "wrong", "triton"),
    ],
)
def test_who_computes_it(deep_gemm_is, cublaslt_is, chosen, monkeypatch):
    """And what is said of it: the first library that passed, Triton where all that were tried failed."""
    install(monkeypatch, {"right": Library(), "wrong": Library(reversed_scales), "absent": None}[deep_gemm_is])
    monkeypatch.setattr(cublaslt, "refusal", lambda given: None)
    monkeypatch.setattr(cublaslt.trial, "tried", {})
    monkeypatch.setattr(cublaslt.trial, "_fault_of", lambda kind: None if cublaslt_is == "right" else "it is wrong")
    given = asked()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert gemm.chosen(given) == chosen
    (said,) = libraries_of(gemm.LIBRARIES, {("1x128", "128x128")}).values()
    assert said == chosen
    assert libraries_of(gemm.LIBRARIES, {("1x128", "1x128")}) == {}


def test_it_is_called_with_the_device_of_its_tensors(monkeypatch):
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


@pytest.mark.parametrize("error", [AssertionError("CUDA_HOME"), TypeError("another signature"), KeyError("x")])
def test_whatever_it_raises_is_a_refusal_with_its_text(error, monkeypatch, caplog):
    def broken(*args, **options):
        raise error

    install(monkeypatch, types.SimpleNamespace(fp8_gemm_nt=broken))
    given = asked(k=256)
    assert not deep_gemm.trial.is_passed(given)
    assert f"it raises {type(error).__name__}: {error}" in caplog.text


def test_an_error_that_spoils_the_context_is_none(monkeypatch):
    def broken(*args, **options):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    install(monkeypatch, types.SimpleNamespace(fp8_gemm_nt=broken))
    with pytest.raises(torch.AcceleratorError):
        deep_gemm.trial.is_passed(asked(k=256))
