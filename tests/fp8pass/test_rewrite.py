"""The rewrite of joint graphs: what fires, what does not and why, ops gone and come, numbers."""

from collections import Counter

import pytest
import torch

from fp8pass import fp8_compile, inspect, state
from tests.support.models import LlamaBlock
from tests.support.training import assert_trains_as

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
