"""Generated code does not grow with the layers: equal layers share their kernels, under every recipe."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile
from lowering import hardware
from tests.support.cross_codegen import capture, report
from tests.support.models import LlamaBlock
from tests.support.traffic import steady

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")


def generated(compile_model: Callable[[nn.Module], Callable], layers: int) -> list[str]:
    """The H200 code of forward and backward."""
    torch._dynamo.reset()
    model = nn.Sequential(*(LlamaBlock(64, 128, 2) for _ in range(layers))).bfloat16()
    x = torch.zeros(1, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    with capture() as graphs:
        compile_model(model)(x).sum().backward()
    assert len(graphs.graphs) == 2
    return [reported.code for reported in report(graphs)]


def distinct(code: str) -> int:
    """Kernels in the code of a graph: Inductor writes equal ones once."""
    return len(set(re.findall(r"^def (triton_\w+)\(", code, re.MULTILINE)))


@functools.cache
def growth(recipe: str | None) -> list[int]:
    """How many more kernels six layers have than two, in forward and in backward."""
    compile_model = torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe))
    two, six = ([distinct(code) for code in generated(compile_model, layers)] for layers in (2, 6))
    assert min(two) >= 3
    return [more - less for less, more in zip(two, six, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_six_layers_have_the_kernels_of_two(recipe):
    plain = growth(None)
    assert all(ours <= theirs for ours, theirs in zip(growth(recipe), plain, strict=True)), (growth(recipe), plain)


def test_a_scale_is_a_pointer_of_its_own():
    """Whatever its slot: no launch makes it one, and its alignment, which is part of a kernel's code, is not taken for more
    than an element's."""
    forward, _ = generated(lambda model: fp8_compile(model, steady("delayed")), 2)
    views = dict(re.findall(r"^ +(buf\d+) = reinterpret_tensor\((\w+), \(\), \(\), \d+\)  # alias", forward, re.MULTILINE))
    calls = re.findall(r"^ +triton_\w+\.run\((.*), stream=", forward, re.MULTILINE)
    used = [name for call in calls for name in call.split(", ") if name in views]
    assert len(used) == len(set(used)) == 6, "the inputs of q, gate and down in both layers"
    (scales,) = set(views.values())
    readers = [call for call in calls if scales in call.split(", ")]
    assert len(readers) <= 2, "where they are loaded, and the vectors of several casts' scales"
