"""Generated code does not grow with the layers: equal layers share their kernels, under every recipe."""

import functools
import re

import pytest
import torch

from benchmarks.contestants import steady
from benchmarks.traffic import distinct, reports_of_stack
from fp8pass import fp8_compile
from lowering import hardware

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
SIZES = (64, 128, 2, 64)


@functools.cache
def codes(recipe: str | None, layers: int) -> list[str]:
    """The generated code of forward and of backward."""
    compile_model = torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe))
    return [graph.code for graph in reports_of_stack(compile_model, layers, SIZES)]


def growth(recipe: str | None) -> list[int]:
    """The kernels that four layers have beyond those of two, in forward and in backward: the first and the last are special."""
    two, four = ([distinct(code) for code in codes(recipe, layers)] for layers in (2, 4))
    assert min(two) >= 3
    return [more - less for less, more in zip(two, four, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_four_layers_have_the_kernels_of_two(recipe):
    plain = growth(None)
    assert all(ours <= theirs for ours, theirs in zip(growth(recipe), plain, strict=True)), (growth(recipe), plain)


def test_a_scale_is_a_pointer_of_its_own():
    """Whatever its slot: no launch makes it one, and its alignment, which is part of a kernel's code, is not taken for more
    than an element's."""
    forward, _ = codes("delayed", 2)
    views = dict(re.findall(r"^ +(buf\d+) = reinterpret_tensor\((\w+), \(\), \(\), \d+\)  # alias", forward, re.MULTILINE))
    calls = re.findall(r"^ +triton_\w+\.run\((.*), stream=", forward, re.MULTILINE)
    used = [name for call in calls for name in call.split(", ") if name in views]
    assert len(used) == len(set(used)) == 6, "the inputs of q, gate and down in both layers"
    (scales,) = set(views.values())
    readers = [call for call in calls if scales in call.split(", ")]
    assert len(readers) <= 2, "where they are loaded, and the vectors of several casts' scales"
