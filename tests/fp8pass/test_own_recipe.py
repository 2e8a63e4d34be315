"""Recipes from users' own files: the one of docs/recipes.md, and decisions that go wrong; and copies for any quantization."""

import dataclasses
import re

import pytest
import torch

from fp8pass import inspect
from fp8pass.errors import RecipeError
from fp8pass.recipes import Granularity, Quantization, Recipe, ScaleFrom, as_recipe
from fp8pass.schemes import eager, scheme_of
from fp8pass.schemes.copies import Layout
from lowering.formats import E4M3, E5M2
from tests.support.cases import each
from tests.support.joint import calls, trace
from tests.support.models import mlp
from tests.support.training import fp8, same

pytest.importorskip("markdown_it")
pytest.importorskip("sybil")

from tests.support.documents import ROOT, fences


def documented():
    code = next(content for _, content in fences(ROOT / "docs/recipes.md") if "class BlockwiseForward" in content)
    code = code.partition("\ncompiled = ")[0]
    assert len(code.splitlines()) <= 40
    namespace = {"__name__": __name__}  # where dataclasses look for the types of fields
    exec(code, namespace)
    return namespace["BlockwiseForward"]


BlockwiseForward = documented()


def test_own_recipes_have_options_and_stand_in_rules():
    recipe = BlockwiseForward(amax_epsilon=0.5, fast_accum_grad_input=True)
    graph = trace(mlp(), torch.randn(16, 64, requires_grad=True), recipe=recipe).run().graph
    found = [(n.kwargs["granularity_a"], n.kwargs["fast_accum"]) for n in calls(graph, torch.ops.lowering.scaled_mm.default)]
    assert sorted(found) == [("block_1x128", False)] * 2 + [("tensor_wise", False)] * 2 + [("tensor_wise", True)] * 2
    assert {n.kwargs["epsilon"] for n in graph.nodes if "epsilon" in n.kwargs} == {0.5}
    compiled = fp8(mlp(), rules={"2:grad_weight": None, "2": BlockwiseForward()})
    compiled(torch.randn(16, 64)).sum().backward()
    found = {(g.module, g.role): g.recipe for g in inspect(compiled).gemms}
    assert found["2", "output"] == found["2", "grad_input"] == "blockwise forward"
    assert (found["2", "grad_weight"], found["0", "output"]) == (None, "current")


@each("granularity, square", [*((g, False) for g in Granularity if g.value != "tensor_wise"), (Granularity.BLOCK_1X32, True)])
def test_copies_that_travelled_are_those_of_a_cast(granularity, square):
    x, quantization, recipe = torch.randn(264, 96), Quantization(E4M3, granularity, square=square), as_recipe("current")
    values = eager.rounded(x, recipe, quantization, "weight")
    for layout in (Layout(False, True), Layout(True, True)):
        (made,) = eager.quantize(eager.CastKind(recipe, quantization, (layout,), x.dtype, x.device), [x])
        is_turned = layout.columnwise and not scheme_of(quantization).has_one_copy(quantization)
        data, scales = eager.compact(x, quantization, columnwise=is_turned)
        for found, wanted in zip(eager.ready(data, scales, quantization, layout), made.data + made.scale_inv, strict=True):
            assert same(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
        held = eager.compact_values(data, scales, quantization)
        assert same(held, values) or (is_turned and (held - x).norm() < 0.05 * x.norm())
    assert same(eager.rounded(x[None], recipe, quantization, "input")[0], values)


# -- decisions that go wrong


@dataclasses.dataclass(frozen=True)
class Fixed(Recipe):
    """One quantization for all but weights."""

    name = "fixed"
    others: Quantization
    weights: Quantization

    def quantization(self, operand, role):
        return self.weights if operand.kind == "weight" else self.others


def quantization(granularity=Granularity.TENSOR_WISE, dtype=E4M3, **options):
    return Quantization(dtype, granularity, **options)


@each(
    "others, weights, reason",
    [
        (quantization(), quantization(Granularity.ROW_WISE), "no FP8 GEMM takes tensor-wise by row-wise scales"),
        (*[quantization(dtype=E5M2)] * 2, "E5M2"),
        (quantization(Granularity.BLOCK_1X32), quantization(Granularity.BLOCK_1X128), "1x32 by 1x128 blocks"),
    ],
)
def test_operands_that_do_not_go_together_stay_in_high_precision(others, weights, reason):
    compiled = fp8(mlp(), Fixed(others, weights))
    compiled(torch.randn(16, 64))
    assert re.match(rf"operand formats: .*{reason}", inspect(compiled).gemms[0].reason)


def test_recipes_that_keep_no_state_or_are_not_hashable_and_quantizations_that_nothing_makes():
    match = r"Fixed.quantization\(\) takes a scale from the state.*derive it from DelayedScaling"
    with pytest.raises(RecipeError, match=match):
        fp8(mlp(), Fixed(quantization(scale_from=ScaleFrom.STATE), quantization()))(torch.randn(16, 64))

    class Listed(Fixed):
        __hash__ = None

    with pytest.raises(RecipeError, match=r"not hashable.*frozen dataclass"):
        fp8(mlp(), Listed(quantization(), quantization()))
    for options, text in (
        ({"dtype": torch.float16}, "use one of torch.float8_e4m3fn"),
        ({"square": True}, "requires BLOCK_1X32"),
        ({"scale_from": ScaleFrom.SHARED}, "does not go with"),
        ({"granularity": Granularity.ROW_WISE, "scale_from": ScaleFrom.STATE}, "does not go with"),
    ):
        with pytest.raises(RecipeError, match=text):
            quantization(**options)
