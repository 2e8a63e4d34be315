"""The plan of GEMMs: which stay in high precision and why, and which copies the others read."""

import pytest
import torch

from fp8pass import Float8BlockScaling
from fp8pass.errors import ReasonKind
from tests.support.joint import trace

A, B, C = (16, 32), (32, 48), (48,)
TILES = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)


def tensors(*shapes, dtype=torch.float32):
    return [torch.ones(s, dtype=dtype) for s in shapes]


NO_BATCHED = "unsupported op: bmm: torch has no batched FP8 GEMM"
ONLY_FLOATS = "only float32, bfloat16 and float16 can become FP8"
EMPTY = "so there is nothing to multiply"
REFUSALS = {
    "beta": (lambda c, a, b: torch.addmm(c, a, b, beta=2), tensors(C, A, B), "current", "unsupported op: addmm with beta=2"),
    "batched": (torch.bmm, tensors((2, *A), (2, *B)), "current", NO_BATCHED),
    "float64": (torch.mm, tensors(A, B, dtype=torch.float64), "current", f"dtype: float64; {ONLY_FLOATS}"),
    "K is 0": (torch.mm, tensors((16, 0), (0, 48)), "delayed", f"shape: K is 0, {EMPTY}"),
    "tiles by tiles": (torch.mm, tensors(A, B), TILES, "operand formats: no FP8 GEMM takes 128x128 by 128x128 blocks"),
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
    assert (decision.recipe, decision.copies) == (None, ())
    assert (decision.reason.kind, str(decision.reason)) == (ReasonKind.RULE, "rule: '*' keeps high precision")
    assert work.plan.names, "what stays has a name, too"
