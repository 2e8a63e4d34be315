"""Who computes a grouped GEMM: CUTLASS after a trial, and what torch is passed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import cutlass, gemm, reference
from lowering.grouped.arguments import GroupedGemm

TENSOR, ROW, MX, ONE, TWO = Granularity
PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR)]
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """cuda:0 is an SM90 with Triton."""
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(hardware, "triton_available", lambda: True)


def operands(has_rows=True, device="cpu", k=64):
    a = torch.zeros((40, k) if has_rows else (3, 40, k), device=device).to(E4M3)
    return a, torch.zeros(3, 32, k, device=device).to(E4M3).mT


def scales(pair, has_rows, device="cpu"):
    shapes = {TENSOR: () if has_rows else (3,), ROW: (40, 1) if has_rows else (3, 40, 1)}, {TENSOR: (3,), ROW: (3, 32, 1)}
    return [torch.ones(of[kind], device=device) for of, kind in zip(shapes, pair, strict=True)]


def asked(a, b, scale_a, bias, granularity_a, granularity_b, out_dtype, fast_accum) -> GroupedGemm:
    """A GEMM, for what asks whether CUTLASS computes it."""
    options = {"granularity_a": granularity_a, "granularity_b": granularity_b}
    return GroupedGemm(a, b, scale_a, torch.ones(()), None, bias, **options, out_dtype=out_dtype, fast_accum=fast_accum)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("has_rows", [True, False])
def test_torch_accepts_what_it_is_passed(pair, has_rows, hopper):
    """Its own checks, which its shape function repeats."""
    a, b = operands(has_rows, "meta")
    scale_a, scale_b = scales(pair, has_rows, "meta")
    assert cutlass.refusal(asked(a, b, scale_a, None, *pair, torch.bfloat16, True)) is None
    offs = torch.empty(3, dtype=torch.int32, device="meta") if has_rows else None
    out = cutlass.scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    assert out.shape == ((40, 32) if has_rows else (3, 40, 32))
    assert out.dtype == torch.bfloat16


def refused():
    a, b = operands()
    one = torch.ones(())
    yield (a, b, one, None, TENSOR, TENSOR, torch.bfloat16, False), "without fast accumulation"
    yield (a, b, one, None, TENSOR, TENSOR, torch.float32, True), "gives bfloat16"
    yield (a.to(E5M2), b, one, None, TENSOR, TENSOR, torch.bfloat16, True), "takes only float8_e4m3fn"
    yield (a, b, torch.ones(40, 1), None, ONE, TWO, torch.bfloat16, True), "no scales per block"
    yield (a, b, torch.ones(3), None, TENSOR, TENSOR, torch.bfloat16, True), "a scale per group"
    yield (a, a.t(), one, None, TENSOR, TENSOR, torch.bfloat16, True), "left to Triton"
    yield (a[:0], b, one, None, TENSOR, TENSOR, torch.bfloat16, True), "a is empty"
    yield (*operands(k=24), one, None, TENSOR, TENSOR, torch.bfloat16, True), "K is 24"
    yield (a, b.contiguous(), one, None, TENSOR, TENSOR, torch.bfloat16, True), "column-major"
    many = torch.empty(1024, 32, 64, device="meta", dtype=E4M3).mT
    yield (a, many, one, None, TENSOR, TENSOR, torch.bfloat16, True), "takes 1023 groups at most, not 1024"


def test_cutlass_takes_1023_groups(hopper):
    a, _ = operands()
    b = torch.empty(1023, 32, 64, device="meta", dtype=E4M3).mT
    assert cutlass.refusal(asked(a, b, torch.ones(()), None, TENSOR, TENSOR, torch.bfloat16, True)) is None


@pytest.mark.parametrize(("form", "reason"), list(refused()))
def test_cutlass_refuses_with_a_reason(form, reason, hopper):
    assert reason in cutlass.refusal(asked(*form))


class Stand:
    """Stands in for CUTLASS: the reference, right, with a wrong order of scales, or refused."""

    def __init__(self, behaviour):
        self.behaviour, self.calls = behaviour, 0

    def __call__(self, a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum):
        self.calls += 1
        if self.behaviour == "raises":
            raise RuntimeError("CUTLASS says no\nand more")
        if self.behaviour == "wrong":
            scale_b = scale_b.flip(1)
        out = reference.scaled_grouped_mm(
            a, b, scale_a, scale_b, offs, granularity_a="row_wise", granularity_b="row_wise", out_dtype=out_dtype
        )
        if offs is not None:
            out[offs[-1] :] = torch.nan  # uninitialized memory
        return out


@pytest.mark.parametrize(("behaviour", "said"), [("right", None), ("wrong", "relative error is"), ("raises", "says no")])
def test_cutlass_is_trusted_after_a_trial(behaviour, said, monkeypatch, caplog):
    stand = Stand(behaviour)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", stand)
    monkeypatch.setattr(cutlass, "_TRIED", {})
    before = torch.get_rng_state()
    pairs = [(ROW, ROW)] if behaviour == "wrong" else PAIRS  # scales per expert have no order along its columns
    for pair in pairs:
        for has_rows in (True, False):
            a, b = operands(has_rows)
            given = asked(a, b, torch.ones(()), None, *pair, torch.bfloat16, True)
            num_calls = stand.calls
            assert cutlass.is_right(given) == (said is None)
            assert stand.calls == num_calls + 1, "each kind is tried"
            cutlass.is_right(given)
            assert stand.calls == num_calls + 1, "once"
    assert torch.equal(torch.get_rng_state(), before)
    assert set(cutlass.trials().values()) == {said is None}
    warnings = [record.getMessage() for record in caplog.records]
    assert bool(warnings) == (said is not None)
    assert all("is not used for" in text and "Triton's is" in text and (said or "") in text for text in warnings)


def test_a_gpu_that_cannot_says_so(monkeypatch):
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (8, 0))
    with FakeTensorMode():
        a, b = operands(device="cuda")
        one, offs = torch.ones((), device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(NotImplementedError, match=r"compute capability 8\.9"):
            gemm.scaled_grouped_mm(a, b, one, one, offs)
