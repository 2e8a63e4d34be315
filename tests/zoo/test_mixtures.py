"""Mixtures of experts of transformers, unchanged: every GEMM of the experts in FP8 with its role, routers in high precision."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect
from tests.support.numerics import sqnr
from tests.zoo.models import MIXTURES

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers)"),
]
DTYPES = ("bfloat16", "float32", "autocast")
OUTPUT, GRADIENT = 18, 12  # dB


def outcome(run, model, case, dtype):
    """Output, and the gradients of the experts' weights."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        out = case.select(run(**case.inputs))
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * seed).sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters() if ".experts." in name}


def check(name, dtype, recipe):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    case = MIXTURES[name]()
    assert isinstance(case.model, nn.Module)
    model = case.model.to(torch.bfloat16) if dtype == "bfloat16" else case.model
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    want, want_gradients = outcome(plain, plain, case, dtype)
    got, gradients = outcome(compiled, model, case, dtype)
    records = inspect(compiled)
    assert len(records.graphs) == 1
    grouped = [g for g in records.gemms if g.groups != 1]
    assert [g for g in grouped if not g.quantized] == []
    experts = {"deepseek_v3": 8}.get(name, 4)
    roles = Counter((g.module.rpartition(".")[2], g.role, g.groups) for g in grouped)
    assert roles == Counter(
        (weight, role, experts) for weight in ("gate_up_proj", "down_proj") for role in ("output", "grad_input", "grad_weight")
    )
    assert all(".mlp.experts." in g.module for g in grouped)
    routers = [g for g in records.gemms if g.module.endswith((".mlp.gate", ".mlp.router"))]
    assert {(g.role, g.quantized) for g in routers} == {(r, False) for r in ("output", "grad_input", "grad_weight")}
    assert sqnr(want, got) >= OUTPUT
    assert min(sqnr(want_gradients[n], gradients[n]) for n in want_gradients) >= GRADIENT


#: Each mixture in one dtype with delayed scaling and with another recipe in the next dtype, by turns: what differs between
#: mixtures is found before a dtype or a recipe is asked.
BY_TURNS = [
    (name, DTYPES[(i + more) % len(DTYPES)], recipe)
    for i, (name, other) in enumerate(zip(MIXTURES, ("current", "rowwise", "blockwise", "", "mxfp8"), strict=True))
    for more, recipe in ((0, "delayed"), (1, other))
    if recipe
]


@pytest.mark.parametrize(("name", "dtype", "recipe"), BY_TURNS)
def test_experts_run_in_fp8(name, dtype, recipe):
    check(name, dtype, recipe)
