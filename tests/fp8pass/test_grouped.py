"""Grouped GEMMs through the pass: bit for bit a loop over the experts, roles, names, gathers, rows of no group, reasons."""

from __future__ import annotations

import pytest
import torch

from fp8pass import fp8_compile, inspect
from tests.support.moe import RECIPES, Experts, expected, offsets

SIZES = (0, 1, 7, 15, 16, 17, 127, 128, 129, 0)
ALL_IN_ONE = (0, 0, 0, sum(SIZES), 0, 0, 0, 0, 0, 0)
K, N = 48, 80


def compiled_experts(recipe, dtype=torch.bfloat16):
    model = Experts(len(SIZES), K, N, dtype)
    return model, fp8_compile(model, recipe, backend="aot_eager")


def run(compiled, model, x, dy, offs):
    """Output, grad_input and grad_weight."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = compiled(x, offs)
    out.backward(dy)
    return out.detach(), x.grad, model.weight.grad


@pytest.mark.parametrize("spare", [0, 21])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_a_loop_over_the_experts_bit_for_bit(recipe, spare):
    """Rows of no group hold NaN, as uninitialized memory may: they reach nothing."""
    model, compiled = compiled_experts(recipe)
    rows = sum(SIZES) + spare
    for sizes in (SIZES, ALL_IN_ONE):
        x, dy = torch.randn(rows, K, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
        x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
        fresh = fp8_compile(model, recipe, backend="aot_eager") if recipe == "delayed" else compiled
        found = run(fresh, model, x, dy, offsets(sizes))
        wanted = expected(recipe, x, model.weight, dy, sizes)
        assert [got.equal(want) for got, want in zip(found, wanted, strict=True)] == [True] * 3
    gemms = inspect(compiled if recipe != "delayed" else fresh).gemms
    assert [(g.role, g.groups, g.quantized) for g in gemms] == [
        ("output", len(SIZES), True),
        ("grad_weight", len(SIZES), True),
        ("grad_input", len(SIZES), True),
    ]
