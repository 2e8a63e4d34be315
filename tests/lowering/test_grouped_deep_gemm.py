"""Grouped GEMMs by DeepGEMM, for which a module with its signatures stands in. Its kernels' cases: grouped_cases.py."""

import types

import pytest
import torch

from lowering import deep_gemm as package
from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import cutlass, deep_gemm, gemm, reference
from lowering.grouped.reference import GroupedGemm, padded_width
from lowering.scaling import scale_shape
from lowering.trials import libraries_of
from tests.lowering.deep_gemm_stand_in import Library, require_trial, reversed_scales

TENSOR, ROW, MX, ONE, TWO = Granularity
GROUPS = 3


def operands(*shape, fp8=E4M3, kind=ONE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(shape, generator=generator).to(fp8)
    scale = scale_shape(shape[-2], shape[-1], kind) if kind is not TENSOR else ()
    return q, torch.rand((*shape[:-2], *scale), generator=generator) + 0.5


def asked(form="rows", m=384, n=1536, k=2048, pair=(ONE, TWO), dtypes=(E4M3, E4M3), bias=None, out_dtype=torch.bfloat16):
    groups_a, groups_b = ((), (GROUPS,)) if form == "rows" else ((), ()) if form == "columns" else ((GROUPS,), (GROUPS,))
    a, scale_a = operands(*groups_a, m, k, fp8=dtypes[0], kind=pair[0])
    b, scale_b = operands(*groups_b, n, k, fp8=dtypes[1], kind=pair[1], seed=1)
    offs = None if form == "stacks" else torch.tensor([m // 3, m // 2, m]).to(torch.int32)
    kinds = {"granularity_a": pair[0].value, "granularity_b": pair[1].value}
    return GroupedGemm(a, b.mT, scale_a, scale_b, offs, bias, **kinds, out_dtype=out_dtype)


def gradients(**sizes):
    return asked("stacks", **({"m": 64, "n": 48, "k": 4096, "pair": (ONE, ONE)} | sizes))


def install(monkeypatch, library):
    """On SM90, with the copies of rows in plain torch: the kernels that make them run on GPUs and in Triton's interpreter."""
    from lowering.grouped import column_kernels as kernels

    def padded_rows(q, scale_inv, offs):
        rows, groups = reference.padded_rows(q, offs, None, 128)
        factors = torch.where((rows >= 0)[:, None], scale_inv[rows.clamp(min=0)], 0.0)
        return rows, q[rows.clamp(min=0)], factors.t().contiguous().t(), torch.where(rows < 0, -1, groups).to(torch.int32)

    def rows_of_groups(padded, rows, num_rows):
        out = torch.full((num_rows, padded.shape[1]), torch.nan, dtype=padded.dtype)
        out[rows[rows >= 0]] = padded[rows >= 0]
        return out

    monkeypatch.setattr(kernels, "padded_rows", padded_rows)
    monkeypatch.setattr(kernels, "rows_of_groups", rows_of_groups)
    monkeypatch.setattr(package, "library", lambda: library)
    monkeypatch.setattr(package, "hardware", types.SimpleNamespace(cuda_capability=lambda device: (9, 0)))
    monkeypatch.setattr(deep_gemm.trial, "tried", {})
    return library


@pytest.fixture
def library(monkeypatch):
    pytest.importorskip("triton")
    return install(monkeypatch, Library())


ACCEPTED = {
    "rows": asked,
    "rows, K and N ragged": lambda: asked(n=1552, k=2064),
    "stacks": lambda: asked("stacks", m=256, n=48, k=272),
    "gradients": gradients,
    "gradients to float32": lambda: gradients(k=2048, out_dtype=torch.float32),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_gets_its_layouts_and_computes_the_reference(name, library):
    given = ACCEPTED[name]()
    assert deep_gemm.refusal(given) is None
    out, expected = deep_gemm.scaled_grouped_mm(given), reference.scaled_grouped_mm(**vars(given))
    assert out.shape == expected.shape
    assert library.calls == 1
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-4 * expected.abs().max().item())


REFUSED = {
    "sizes of the groups from the host": lambda: asked(
        "columns", m=64, n=48, k=padded_width(300, GROUPS, 128), pair=(ONE, ONE)
    ),
    "1x128 by 128x128 scales, not 1x128 by 1x128": lambda: asked(pair=(ONE, ONE)),
    "not tensor-wise by tensor-wise": lambda: asked(pair=(TENSOR, TENSOR)),
    "takes only float8_e4m3fn": lambda: asked(dtypes=(E5M2, E4M3)),
    "no bias": lambda: asked(bias=torch.zeros(GROUPS, 1536)),
    "gives bfloat16": lambda: asked(out_dtype=torch.float32),
    "fewer than 128 rows": lambda: asked(m=383),
    "copies of rows are estimated to take longer": lambda: asked(k=512),
    "N 1544 and K 2048 are not multiples of 16": lambda: asked(n=1544),
    "M 200 is not a multiple of 128": lambda: asked("stacks", m=200, n=48, k=272),
    "float32 sum is estimated to take longer": lambda: gradients(k=2048),
    "K 4112 is not a multiple of 128": lambda: gradients(k=4112),
    "M 64 and N 46 are not multiples of 4": lambda: gradients(n=46),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_have_or_would_not_gain_is_refused(reason, library):
    assert reason in deep_gemm.refusal(REFUSED[reason]())


def test_releases_that_lack_something_are_refused(monkeypatch):
    given = asked()
    install(monkeypatch, types.SimpleNamespace(fp8_gemm_nt=None))
    assert deep_gemm.refusal(given) == "this release of deep_gemm has no m_grouped_fp8_gemm_nt_contiguous"
    assert deep_gemm.refusal(gradients()) == "this release of deep_gemm has no k_grouped_fp8_gemm_nt_contiguous"
    install(monkeypatch, types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=None))
    assert "does not say where groups have to begin" in deep_gemm.refusal(given)
    for rows, reason in ((256, "its tiles have 256 rows, and groups begin at multiples of 128"), (64, None)):
        older = {"get_m_alignment_for_contiguous_layout": lambda rows=rows: rows}
        install(monkeypatch, types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=None, **older))
        assert deep_gemm.refusal(given) == reason
    install(monkeypatch, None)
    assert deep_gemm.refusal(given) == "the package deep_gemm is not installed"


@pytest.mark.parametrize("spoil", [None, reversed_scales])
@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_trusted_after_a_trial(name, spoil, library, monkeypatch, caplog):
    library = install(monkeypatch, Library() if spoil is None else Library(spoil))
    require_trial(deep_gemm.trial, ACCEPTED[name](), library, spoil is None)
    assert library.calls == 1
    assert ("DeepGEMM's grouped GEMM is not used for" in caplog.text) == (spoil is not None)


def test_who_computes_it_and_what_is_said_of_it(library, monkeypatch):
    """CUTLASS has no blocks; without the package Triton computes them, too."""
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(cutlass.trial, "tried", {})
    assert gemm.chosen(asked()) == "deep_gemm"
    install(monkeypatch, Library(reversed_scales))
    assert gemm.chosen(asked()) == "triton"
    ((kind, name),) = libraries_of(gemm.LIBRARIES).items()
    assert (kind, name) == ("1x128 by 128x128 scales of rows in groups on cpu", "triton")
    assert libraries_of(gemm.LIBRARIES, {("1x128", "128x128")}) == {kind: "triton"}
    assert libraries_of(gemm.LIBRARIES, {("row-wise", "row-wise")}) == {}
    install(monkeypatch, None)
    assert gemm.chosen(asked()) == "triton"
    assert libraries_of(gemm.LIBRARIES) == {}


def computed_by(name, given):
    return gemm.prepared(name, given)(given.a, given.b, given.scale_inv_a, given.scale_inv_b, given.offs, given.bias)


def test_rows_of_no_group_become_zeros(library, monkeypatch):
    from lowering.grouped import gemm_kernels as kernel

    cleared = []
    monkeypatch.setattr(kernel, "clear_rows_of_no_group", lambda out, offs: cleared.append(offs) or out)
    given = asked()
    computed_by("deep_gemm", given)
    assert [offs is given.offs for offs in cleared] == [True]
    computed_by("deep_gemm", ACCEPTED["stacks"]())
    assert len(cleared) == 1, "stacks have none"
