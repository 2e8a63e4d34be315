"""Grouping: fires where casts stand ready together, nowhere else, and changes no number."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect
from fp8pass.rewrite import runner
from tests.support.models import LlamaBlock, mlp


def ops_of(compiled) -> Counter:
    return Counter(str(n.target) for n in inspect(compiled).graphs[0].after.graph.nodes if n.op == "call_function")


def step(model: nn.Module, recipe: str, x: torch.Tensor):
    model = copy.deepcopy(model)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    for _ in range(2):
        given = x.clone().requires_grad_()
        out = compiled(given)
        out.square().sum().backward()
    return compiled, [out.detach(), given.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_and_attention_gradients_are_grouped_without_a_change_of_numbers(recipe):
    model, x = LlamaBlock(64, 128, 2), torch.randn(2, 16, 64)
    compiled, grouped = step(model, recipe, x)
    assert ops_of(compiled)["lowering.multi_cast_transpose_amax.default"] == 2
    assert ops_of(compiled)["lowering.multi_amax.default"] == (2 if recipe == "current" else 0)
    torch._dynamo.reset()
    with runner.without("plan launches"):
        compiled, alone = step(model, recipe, x)
    assert ops_of(compiled)["lowering.multi_cast_transpose_amax.default"] == 0
    assert all(torch.equal(g, a) for g, a in zip(grouped, alone, strict=True))


def test_a_single_weight_is_no_group():
    compiled, _ = step(nn.Linear(32, 32), "delayed", torch.randn(16, 32))
    counts = ops_of(compiled)
    assert counts["lowering.multi_cast_transpose_amax.default"] <= 1  # the weight and the input: both stand ready
    compiled, _ = step(nn.Sequential(nn.GELU(), nn.Linear(32, 32)), "delayed", torch.randn(16, 32))
    assert ops_of(compiled)["lowering.multi_cast_transpose_amax.default"] == 0


def test_different_paddings_are_different_groups():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 20), nn.GELU(), nn.Linear(20, 32))
    compiled, _ = step(model, "delayed", torch.randn(16, 32))
    flags = [
        tuple(sorted(n.kwargs.items()))
        for n in inspect(compiled).graphs[0].after.graph.nodes
        if "multi_cast_transpose" in str(n.target)
    ]
    assert len(flags) == len(set(flags))


def test_inference_casts_one_copy_and_groups_nothing():
    compiled = fp8_compile(mlp(), "delayed", backend="aot_eager")
    with torch.no_grad():
        compiled(torch.randn(16, 64))
    assert ops_of(compiled)["lowering.multi_cast_transpose_amax.default"] == 0
