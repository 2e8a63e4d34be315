"""The implementation of a grouped GEMM: CUTLASS after a trial, and what torch is passed."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import cutlass, gemm, reference
from lowering.grouped.reference import GroupedGemm
from tests.lowering.deep_gemm_stand_in import require_trial

TENSOR, ROW, MX, ONE, TWO = Granularity
PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR)]
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """cuda:0 is an SM90 with Triton."""
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(hardware, "triton_available", lambda: True)


FORMS = ("rows", "columns", "stacks")


def operands(form="rows", device="cpu", k=64):
    a = torch.zeros((3, 40, k) if form == "stacks" else (40, k), device=device).to(E4M3)
    return a, torch.zeros((32, k) if form == "columns" else (3, 32, k), device=device).to(E4M3).mT


def scales(pair, form, device="cpu"):
    shapes = {
        "rows": ({TENSOR: (), ROW: (40, 1)}, {TENSOR: (3,), ROW: (3, 32, 1)}),
        "columns": ({TENSOR: (), ROW: (3, 40, 1)}, {TENSOR: (3,), ROW: (3, 32, 1)}),
        "stacks": ({TENSOR: (3,), ROW: (3, 40, 1)}, {TENSOR: (3,), ROW: (3, 32, 1)}),
    }
    return [torch.ones(of[kind], device=device) for of, kind in zip(shapes[form], pair, strict=True)]


def asked(a, b, scale_a, bias, granularity_a, granularity_b, out_dtype, fast_accum) -> GroupedGemm:
    """A GEMM, for what asks whether CUTLASS computes it."""
    options = {"granularity_a": granularity_a, "granularity_b": granularity_b}
    num_groups = b.shape[0] if b.dim() == 3 else 3
    offs = None if a.dim() == 3 else torch.empty(num_groups, dtype=torch.int32, device=a.device)
    return GroupedGemm(a, b, scale_a, torch.ones(()), offs, bias, **options, out_dtype=out_dtype, fast_accum=fast_accum)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_torch_accepts_what_it_is_passed(pair, form, hopper):
    """Its own checks, which its shape function repeats."""
    a, b = operands(form, "meta")
    scale_a, scale_b = scales(pair, form, "meta")
    given = asked(a, b, scale_a, None, *pair, torch.bfloat16, True)
    assert cutlass.refusal(given) is None
    out = cutlass.scaled_grouped_mm(dataclasses.replace(given, scale_inv_b=scale_b))
    assert out.shape == ((40, 32) if form == "rows" else (3, 40, 32))
    assert out.dtype == torch.bfloat16


def refused():
    a, b = operands()
    one = torch.ones(())
    yield (a, b, one, None, TENSOR, TENSOR, torch.bfloat16, False), "without fast accumulation"
    yield (a, b, one, None, TENSOR, TENSOR, torch.float32, True), "gives bfloat16"
    yield (a.to(E5M2), b, one, None, TENSOR, TENSOR, torch.bfloat16, True), "takes only float8_e4m3fn"
    yield (a, b, torch.ones(40, 1), None, ONE, TWO, torch.bfloat16, True), "no scales per block"
    yield (a, b, torch.ones(3), None, TENSOR, TENSOR, torch.bfloat16, True), "a scale per group"
    yield (a, torch.zeros(64, 32).to(E4M3), one, None, TENSOR, TENSOR, torch.bfloat16, True), "column-major"
    yield (a[:0], b, one, None, TENSOR, TENSOR, torch.bfloat16, True), "a is empty"
    yield (*operands(k=24), one, None, TENSOR, TENSOR, torch.bfloat16, True), "K is 24"
    yield (a, b.contiguous(), one, None, TENSOR, TENSOR, torch.bfloat16, True), "column-major"
    at_an_odd_address = torch.zeros(40 * 64 + 1, dtype=torch.uint8)[1:].view(E4M3).view(40, 64)
    yield (at_an_odd_address, b, one, None, TENSOR, TENSOR, torch.bfloat16, True), "multiples of 16"
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
    """Stands in for CUTLASS: the reference, right, with a wrong order of scales, without zeros for empty groups, or refused."""

    def __init__(self, behaviour):
        self.behaviour, self.calls = behaviour, 0

    def __call__(self, a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum):
        self.calls += 1
        if self.behaviour == "raises":
            raise RuntimeError("CUTLASS says no\nand more")
        if self.behaviour == "wrong":
            scale_b = scale_b.flip(-1)
        if b.dim() == 2:
            out = self.of_columns(a, b, scale_a, scale_b, offs.tolist(), out_dtype)
        else:
            kinds = {"granularity_a": "row_wise", "granularity_b": "row_wise"}
            out = reference.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **kinds, out_dtype=out_dtype)
            if offs is not None:
                out[offs[-1] :] = torch.nan  # uninitialized memory
        return out

    def of_columns(self, a, b, scale_a, scale_b, ends, out_dtype):
        """torch's own semantics: groups end at `ends` in memory; scales [E * M] and [E * N]."""
        assert all(end % 16 == 0 for end in ends)
        scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
        parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        out = torch.stack([a[:, part].float() @ b[part].float() for part in parts]) * scale_a * scale_b
        if self.behaviour == "no zeros":
            out[[part.start == part.stop for part in parts]] = torch.nan
        return out.to(out_dtype)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [("right", None), ("wrong", "relative error is"), ("raises", "says no"), ("no zeros", "relative error")],
)
def test_cutlass_is_trusted_after_a_trial(behaviour, said, monkeypatch, caplog):
    stand = Stand(behaviour)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", stand)
    monkeypatch.setattr(cutlass.trial, "tried", {})
    pairs = [(ROW, ROW)] if behaviour == "wrong" else PAIRS  # scales per expert have no order along its columns
    for pair in pairs:
        for form in ("columns",) if behaviour == "no zeros" else FORMS:
            a, b = operands(form)
            given = asked(a, b, torch.ones(()), None, *pair, torch.bfloat16, True)
            require_trial(cutlass.trial, given, stand, said is None)
    assert set(cutlass.trial.tried.values()) == {said is None}
    warnings = [record.getMessage() for record in caplog.records]
    assert bool(warnings) == (said is not None)
    assert all("is not used for" in text and "Triton's is" in text and (said or "") in text for text in warnings)


@pytest.mark.parametrize("pair", PAIRS)
def test_columns_by_cutlass_equal_the_reference(pair, monkeypatch):
    """Groups at padded offsets, one of them empty; columnwise copies as the casts write them."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", Stand("right"))
    torch.manual_seed(0)
    offs = torch.tensor([5, 5, 40, 57], dtype=torch.int32)
    copies, scales_inv = [], []
    for kind, cols in zip(pair, (48, 32), strict=True):
        x = torch.randn(60, cols)
        if kind is ROW:
            q, scale_inv = reference.cast_columns(x, E4M3, offs, granularity="row_wise")
        else:
            q, scale_inv = reference.transposed_copy((x * 8).to(E4M3), offs), torch.tensor(1 / 8)
        copies.append(q)
        scales_inv.append(scale_inv)
    kinds = {"granularity_a": pair[0].value, "granularity_b": pair[1].value}
    expected = reference.scaled_grouped_mm(copies[0], copies[1].mT, *scales_inv, offs, **kinds)
    found = cutlass.scaled_grouped_mm(GroupedGemm(copies[0], copies[1].mT, *scales_inv, offs, **kinds, fast_accum=True))
    assert found.shape == expected.shape
    assert (found[1] == 0).all()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_a_gpu_that_cannot_says_so(monkeypatch):
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (8, 0))
    with FakeTensorMode():
        a, b = operands(device="cuda")
        one, offs = torch.ones((), device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(NotImplementedError, match=r"compute capability 8\.9"):
            gemm.scaled_grouped_mm(a, b, one, one, offs)
