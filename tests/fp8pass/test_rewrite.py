"""The rewrite of joint graphs: what fires, what does not and why, ops gone and come, numbers."""

import copy
import functools
from collections import Counter

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, state
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, ResidualMlp, mlp
from tests.support.numerics import sqnr
from tests.support.training import assert_trains_as, step
from tests.tolerances import SAVED_BY_DEFAULT, SQNR_MODEL_GRADIENT

RECIPES = [DelayedScaling(amax_history_len=8), Float8CurrentScaling()]
GEMMS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_llama_block(recipe):
    block = LlamaBlock().bfloat16()
    compiled = fp8_compile(block, recipe, backend="aot_eager")
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    for _ in range(2):
        step(compiled, block, x)
    assert_trains_as(compiled, block, x)

    report = inspect(compiled)
    assert {(g.module, g.role): (g.m, g.n, g.k) for g in report.gemms} == block_gemms(128)
    assert all(g.quantized and g.reason is None for g in report.gemms)
    assert {(g.a_format, g.b_format) for g in report.gemms if g.role == "output"} == {("e4m3", "e4m3")}
    assert {(g.a_format, g.b_format) for g in report.gemms if g.role != "output"} == {("e5m2", "e4m3")}
    assert all(g.source.rsplit(":", 1)[0].endswith("models.py") for g in report.gemms)
    before, after = count_ops(report.graphs[0].before), count_ops(report.graphs[0].after)
    assert before["aten.mm"] == 21
    assert after["aten.mm"] == 0
    assert after["lowering.scaled_mm"] == 21
    # 7 weights share a launch, and so do the gradients of q, k and v; 4 gradients have one of their own. The 4 inputs are cast
    # rowwise in forward and, from recomputed values, columnwise in backward.
    nodes = report.graphs[0].after.graph.nodes
    casts = functools.partial(casts_by, torch.ops.lowering.cast.default, nodes)
    assert [len(n.args[0]) for n in casts(many=True, both=True)] == [7, 3]
    assert (len(casts(many=False, both=True)), len(casts(both=False))) == (4, 2 * 4)
    tensors = 4 + 2 + 4  # inputs; what shares a launch; other gradients
    assert after["lowering.scales_from_amax"] == (0 if recipe.keeps_state else tensors)
    assert after["lowering.record_amax"] == (2 if recipe.keeps_state else 0), "one a side"


def test_input_of_q_k_and_v_is_quantized_once():
    compiled = fp8_compile(LlamaBlock(), "current", backend="aot_eager")
    compiled(torch.randn(1, 16, 128)).sum().backward()
    graph = inspect(compiled).graphs[0].after.graph
    gemms = [n for n in graph.nodes if n.target is torch.ops.lowering.scaled_mm.default][:3]
    assert len({n.args[0] for n in gemms}) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_forward_saves_fp8_for_backward(recipe):
    """Bytes saved by one transformer block, FP8 against bf16, counted on both forward graphs in the same way."""
    x = torch.randn(8, 256, 128, dtype=torch.bfloat16, requires_grad=True)
    saved = {}
    for name, rules in (("fp8", None), ("bf16", {"*": None})):
        torch.manual_seed(0)
        compiled = fp8_compile(LlamaBlock().bfloat16(), recipe, rules=rules, backend="aot_eager")
        compiled(x).sum().backward()
        saved[name] = inspect(compiled).graphs[0].saved_bytes
    assert saved["fp8"] <= SAVED_BY_DEFAULT * saved["bf16"]


@pytest.mark.parametrize(("backend", "make", "width"), [("aot_eager", LlamaBlock, 128), ("inductor", ResidualMlp, 64)])
def test_rules_that_exclude_everything_change_no_bit(backend, make, width):
    model = make().bfloat16()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 24, width, dtype=torch.bfloat16)
    ours = fp8_compile(model, DelayedScaling(), rules={"*": None}, backend=backend)
    theirs = torch.compile(plain, backend=backend)
    for _ in range(2):
        outs = [compiled(x) for compiled in (ours, theirs)]
        assert outs[0].equal(outs[1])
        for out in outs:
            out.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.equal(q.grad)
    report = inspect(ours)
    assert not any(g.quantized for g in report.gemms)
    assert {g.reason for g in report.gemms} == {"rule: '*' keeps high precision"}
    assert state(ours).tensors == []


def test_rules_by_module_and_role():
    current = Float8CurrentScaling(use_power_2_scales=True)
    rules = {"2:grad_weight": None, "2": current, "nowhere.*": None}
    compiled = fp8_compile(mlp(), DelayedScaling(), rules=rules, backend="aot_eager")
    compiled(torch.randn(16, 64, requires_grad=True)).sum().backward()
    report = inspect(compiled)
    decided = {(g.module, g.role): g.recipe if g.quantized else None for g in report.gemms}
    assert decided == {
        ("0", "output"): "delayed",
        ("0", "grad_input"): "delayed",
        ("0", "grad_weight"): "delayed",
        ("2", "output"): "current",
        ("2", "grad_input"): "current",
        ("2", "grad_weight"): None,
    }
    assert report.unmatched_rules == ["nowhere.*"]
    assert "'nowhere.*' has matched no GEMM" in str(report)
    assert set(state(compiled).tensors) == {"0:input", "0:weight", "0:grad_output"}


class Attention(nn.Module):
    def forward(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)), torch.baddbmm(q[:, :, :1], q, k.transpose(1, 2))


def test_batched_matmuls_stay_with_a_reason():
    compiled = fp8_compile(Attention(), "current", backend="aot_eager")
    q, k = (torch.randn(3, 16, 32, requires_grad=True) for _ in range(2))
    sum(out.sum() for out in compiled(q, k)).backward()
    gemms = inspect(compiled).gemms
    assert Counter(g.op for g in gemms) == {"bmm": 5, "baddbmm": 1}
    assert all(g.reason.startswith("unsupported op:") for g in gemms)


def test_matmul_of_two_activations_treats_both_as_inputs():
    compiled = fp8_compile(lambda a, b: a @ b, DelayedScaling(), backend="aot_eager")
    a, b = torch.randn(16, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    compiled(a, b).sum().backward()
    assert set(state(compiled).tensors) == {"matmul:input", "matmul:input#2", "matmul:grad_output"}
    assert [g.role for g in inspect(compiled).gemms].count("output") == 1
    assert {g.role for g in inspect(compiled).gemms} == {"output", "grad_input", "grad_weight"}


def test_tied_weight_is_quantized_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.up = nn.Linear(32, 32)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.up(self.embedding(tokens))) + self.head(self.embedding(tokens))

    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, DelayedScaling(), backend="aot_eager", select="all")
    tokens = torch.arange(32) % 64
    for _ in range(2):
        model.zero_grad()
        compiled(tokens).square().sum().backward()
    plain(tokens).square().sum().backward()
    names = state(compiled).tensors
    assert [n for n in names if n.startswith("head")] == [
        "head:input",
        "head:weight",
        "head:input#2",
        "head:grad_output",
    ]
    assert sqnr(plain.embedding.weight.grad, model.embedding.weight.grad) >= SQNR_MODEL_GRADIENT


@pytest.mark.parametrize("recipe", [*RECIPES, "blockwise", "rowwise"], ids=str)
def test_recomputed_weight_copies_save_memory_and_change_no_bit(recipe):
    x = torch.randn(4, 64, 64, dtype=torch.bfloat16)
    results, saved = [], []
    for copies in ("save", "recompute"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = nn.Sequential(ResidualMlp(), ResidualMlp()).bfloat16()
        compiled = fp8_compile(block, recipe, backend="aot_eager", weight_copies=copies)
        for _ in range(2):
            block.zero_grad()
            given = x.clone().requires_grad_()
            out = compiled(given)
            out.square().sum().backward()
        results.append([out, given.grad, *(p.grad for p in block.parameters())])
        saved.append(inspect(compiled).graphs[0].saved_bytes)
        assert all(g.quantized for g in inspect(compiled).gemms)
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    num_weights = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert saved[0] - saved[1] >= num_weights - 1024  # some scales are saved in their place
