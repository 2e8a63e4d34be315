"""The rewrite of joint graphs: what is planned, what stays in high precision and why, operations gone and come, numbers."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn

from fp8pass import Float8BlockScaling, fp8_compile, inspect, state
from fp8pass.errors import ReasonKind
from tests.support.joint import calls, trace
from tests.support.models import LlamaBlock, Net
from tests.support.training import assert_trains_as
from tests.tolerances import SQNR_LINEAR_E4M3, sqnr

ops = torch.ops.lowering


def count_ops(graph_module):
    return Counter(str(n.target).rsplit(".", 1)[0] for n in graph_module.graph.nodes if n.op == "call_function")


def block_gemms(tokens, dim=128, ffn=256):
    """(module, role) -> (m, n, k) of a LlamaBlock, written down by hand."""
    sizes = {"wq": (dim, dim), "wk": (dim, dim), "wv": (dim, dim), "wo": (dim, dim)}
    sizes |= {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
    expected = {}
    for module, (out, into) in sizes.items():
        expected[module, "output"] = (tokens, out, into)
        expected[module, "grad_input"] = (tokens, into, out)
        expected[module, "grad_weight"] = (out, into, tokens)
    return expected


CASES = {
    "current": ("aot_eager", "", "e5m2"),
    "blockwise": ("aot_eager", "_blockwise", "e4m3"),
    "mxfp8_with_gw_hp": ("aot_eager", "_mxfp8", "e4m3"),
    "delayed": ("inductor", "", "e5m2"),
    "mxfp8": ("inductor", "_mxfp8", "e4m3"),
}


@pytest.mark.parametrize("recipe", CASES)
def test_llama_block(recipe):
    backend, gemm, gradients = CASES[recipe]
    block, x = LlamaBlock().bfloat16(), torch.randn(2, 64, 128, dtype=torch.bfloat16)
    compiled = fp8_compile(block, recipe, backend=backend)
    assert_trains_as(compiled, block, x, warm_up=2 if gemm == "" else 0)

    report = inspect(compiled)
    assert {(g.module, g.role): (g.m, g.n, g.k) for g in report.gemms} == block_gemms(128)
    kept = {"grad_weight"} if recipe.endswith("_with_gw_hp") else set()
    assert {g.role for g in report.gemms if not g.quantized} == {g.role for g in report.gemms if g.reason} == kept
    formats = {(g.role == "output", g.a_format, g.b_format) for g in report.gemms if g.quantized}
    assert formats == {(True, "e4m3", "e4m3"), (False, gradients, "e4m3")}
    assert all(g.source.rsplit(":", 1)[0].endswith("models.py") for g in report.gemms)
    before, after = count_ops(report.graphs[0].before), count_ops(report.graphs[0].after)
    num_quantized = sum(g.quantized for g in report.gemms)
    assert (before["aten.mm"], after["aten.mm"]) == (21, 21 - num_quantized)
    assert after["lowering.scaled_mm"] == num_quantized
    assert bool(state(compiled).tensors) == (recipe == "delayed")
    assert after["lowering.record_amax"] == (2 if recipe == "delayed" else 0), "one a side"


def test_cut_rows_of_a_batch_leave_no_gaps():
    """A batch on the left of one GEMM and on the right of another, whose N, 40, is padded: so are the rows of the first."""
    right, left = (nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((64, 48), (48, 64)))
    model = Net(lambda m, x: (torch.bmm(x, m.right), torch.bmm(m.left, x.mT)), right=right, left=left)
    compiled, x = fp8_compile(model, "current", backend="aot_eager", select="all"), torch.randn(4, 40, 64)
    for found, wanted in zip(compiled(x), model(x), strict=True):
        assert found.stride() == wanted.stride()
        assert sqnr(wanted, found) >= SQNR_LINEAR_E4M3
    assert all(g.quantized for g in inspect(compiled).gemms)


def test_generated_code_reads_products_with_gaps_and_only_results_of_the_model_have_none():
    joint = trace(nn.Sequential(*(nn.Linear(n, m) for n, m in ((32, 20), (20, 24)))), torch.randn(2, 16, 32), trains=False)
    joint = dataclasses.replace(joint, options=dataclasses.replace(joint.options, contiguous_outputs=False))
    (copied,) = calls(joint.run().graph, torch.ops.aten.clone.default)
    assert copied.meta["val"].shape == (32, 24)


# -- the plan of GEMMs

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
