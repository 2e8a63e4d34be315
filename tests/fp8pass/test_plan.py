"""The plan of GEMMs: which stay in high precision and why, and which copies the others read."""

import dataclasses

import pytest
import torch
from torch import fx

from fp8pass import DelayedScaling, Float8BlockScaling
from fp8pass.errors import ReasonKind
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.origin import TensorName
from fp8pass.graph.values import MatrixValue
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.rewrite.plan import Plan, Rewritten, make_plan
from fp8pass.rules import parse_rules
from fp8pass.schemes.copies import Copy
from lowering.formats import E4M3, E5M2, Granularity
from tests.support.joint import trace
from tests.support.models import mlp

A, B, C = (16, 32), (32, 48), (48,)
TILES = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)


def tensors(*shapes, dtype=torch.float32):
    return [torch.ones(s, dtype=dtype) for s in shapes]


NO_BATCHED = "unsupported op: bmm: torch has no batched FP8 GEMM"
ONLY_FLOATS = "only float32, bfloat16 and float16 can become FP8"
EMPTY = "so there is nothing to multiply"
REFUSALS = {
    "beta": (lambda c, a, b: torch.addmm(c, a, b, beta=2), tensors(C, A, B), "current", "unsupported op: addmm with beta=2"),
    "alpha and beta": (
        lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=0), tensors(C, A, B), "current",
        "unsupported op: addmm with beta=0, alpha=0.5",
    ),
    "batched": (torch.bmm, tensors((2, *A), (2, *B)), "current", NO_BATCHED),
    "batch of one of two activations": (torch.bmm, tensors((1, *A), (1, *B)), "current", NO_BATCHED),
    "float64": (torch.mm, tensors(A, B, dtype=torch.float64), "current", f"dtype: float64; {ONLY_FLOATS}"),
    "integers": (torch.mm, tensors(A, B, dtype=torch.int32), "delayed", f"dtype: int32; {ONLY_FLOATS}"),
    "float64 behind a cast": (lambda a, b: a.float() @ b, [torch.ones(A).double(), torch.ones(B)], "current", None),
    "M is 0": (torch.mm, tensors((0, 32), B), "current", f"shape: M is 0, {EMPTY}"),
    "N is 0": (torch.mm, tensors(A, (32, 0)), "current", f"shape: N is 0, {EMPTY}"),
    "K is 0": (torch.mm, tensors((16, 0), (0, 48)), "delayed", f"shape: K is 0, {EMPTY}"),
    "tiles by tiles": (torch.mm, tensors(A, B), TILES, "operand formats: no FP8 GEMM takes 128x128 by 128x128 blocks"),
    "alpha is 1": (lambda c, a, b: torch.addmm(c, a, b, alpha=1), tensors(C, A, B), "current", None),
    "small": (torch.mm, tensors((1, 1), (1, 1)), "delayed", None),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_reasons(case):
    function, inputs, recipe, reason = REFUSALS[case]
    (decision,) = trace(function, *inputs, recipe=recipe, dynamic=False).run("plan GEMMs").plan.decisions
    assert (None if decision.reason is None else str(decision.reason)) == reason
    assert len(decision.copies) == (2 if reason is None else 0)
    assert decision.recipe is not None


def test_rules_come_before_every_obstacle_and_what_stays_reads_nothing():
    work = trace(torch.mm, *tensors(A, B, dtype=torch.float64), rules={"*": None}).run("plan GEMMs")
    (decision,) = work.plan.decisions
    assert decision.recipe is None
    assert (decision.reason.kind, str(decision.reason)) == (ReasonKind.RULE, "rule: '*' keeps high precision")
    assert work.plan.names, "what stays has a name, too"
    work = trace(mlp(), torch.randn(16, 64), rules={"2": None}).run("plan GEMMs")
    kept = [d for d in work.plan.decisions if d.reason is not None]
    assert {d.site.module for d in kept} == {"2"}
    assert all(d.copies == () for d in kept)
    assert [d.site.module for d in work.plan.rewritten] == ["0", "0"]
    assert dataclasses.replace(work.plan, decisions=tuple(kept)).copies == {}


def test_only_recipes_that_keep_state_care_where_it_is():
    sites = list(trace(torch.mm, *tensors(A, B)).run("discover").sites)
    for device in (torch.device("cuda", 0), None):
        (decision,) = make_plan(sites, parse_rules("delayed", None), device).decisions
        assert str(decision.reason) == f"device: on cpu; the amax histories of this graph are on {device}"
    for recipe, device in (("current", torch.device("cuda", 0)), ("current", None), ("delayed", torch.device("cpu"))):
        assert make_plan(sites, parse_rules(recipe, None), device).decisions[0].reason is None


def test_one_value_in_two_formats_has_two_names():
    graph, recipe = fx.Graph(), DelayedScaling()
    value, name = MatrixValue(graph.placeholder("x"), 16, 32), TensorName("up", "input")
    copies = [
        Copy(value, columnwise, Quantization(dtype, Granularity.TENSOR_WISE, scale_from=ScaleFrom.STATE), recipe, name)
        for dtype, columnwise in ((E4M3, False), (E5M2, False), (E4M3, True))
    ]
    site = GemmSite(graph.placeholder("y"), "up", None, "output", 16, 16, 32, "", (), False)
    pairs = [(copies[0], copies[1]), (copies[2], copies[1])]
    plan = Plan(tuple(Rewritten(site, recipe, pair) for pair in pairs), {value: name})
    assert [str(n) for n in plan.slot_names(recipe)] == ["up:input", "up:input@float8_e5m2"]
    assert list(plan.copies.values()) == [[copies[0], copies[2]], [copies[1]]]
