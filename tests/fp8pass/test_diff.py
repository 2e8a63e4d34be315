"""`diff`: what two inspections decided differently, and why."""

import copy
import json

import pytest
import torch
from torch import nn

from fp8pass import Float8CurrentScaling, Format, diff, fp8_compile, inspect
from fp8pass.errors import OptionError
from tests.support.models import Stack, mlp


def layers():
    return Stack((mlp(32, 64, 32) for _ in range(2)), nn.Linear(32, 16, bias=False), residual=True)


def inspected(recipe="current", rows=16, model=None, **options):
    torch._dynamo.reset()
    compiled = fp8_compile(model or layers(), recipe, backend="aot_eager", **options)
    compiled(torch.randn(rows, 32, requires_grad=True)).sum().backward()
    return inspect(compiled)


@pytest.fixture(scope="module")
def plain():
    return inspected()


def test_equal_runs_differ_in_nothing(plain):
    found = diff(plain, inspected(rows=48))
    assert not found
    assert (found.changes, found.only_before, found.only_after, found.settings) == ([], [], [], [])
    assert (found.num_equal, found.num_resized) == (len(plain.gemms), len(plain.gemms))
    assert str(found) == "0 GEMMs changed their decision; 15 kept it, 15 of them with another shape.\n"


def causes(found):
    return {(c.module, c.role): c.causes for c in found.changes}


def test_another_rule_is_the_only_cause_even_where_shapes_differ(plain):
    found = diff(plain, inspected(rows=32, rules={"layers.1.*:grad_weight": None}))
    why = ("rule: none -> 'layers.1.*:grad_weight'",)
    assert causes(found) == {(f"layers.1.{i}", "grad_weight"): why for i in (2, 0)}
    assert all(c.before["quantized"] and not c.after["quantized"] for c in found.changes)
    assert found.settings == ["Rule 'layers.1.*:grad_weight' is only in the second."]
    found = diff(inspected("delayed", rules={"layers.0.0": "current"}), inspected("delayed", rules={"layers.0.0": None}))
    why = ("rule 'layers.0.0': Float8CurrentScaling() -> None",)
    assert causes(found) == {("layers.0.0", role): why for role in ("output", "grad_input", "grad_weight")}


def test_another_recipe_or_option(plain):
    found = diff(plain, inspected(Float8CurrentScaling(fp8_format=Format.E4M3)))
    cause = "recipe: Float8CurrentScaling() -> Float8CurrentScaling(fp8_format=E4M3)"
    assert {role for _, role in causes(found)} == {"grad_input", "grad_weight"}
    assert set(causes(found).values()) == {(cause,)}
    assert f"{cause}." in found.settings
    found = diff(plain, inspected(select="all"))
    assert {module for module, _ in causes(found)} == {"head"}
    assert set(causes(found).values()) == {("select: auto -> all",)}


def test_a_shape_that_becomes_too_thin_and_gemms_of_one_side(plain):
    model = layers()
    model.head = nn.Linear(32, 96, bias=False)
    found = diff(inspected(model=model), plain)
    change = next(c for c in found.changes if c.role == "output")
    assert (change.module, change.causes) == ("head", ("shape: 16 x 96 x 32 -> 16 x 16 x 32",))
    assert change.after["reason"].startswith("thin")
    model = layers()
    model.layers.append(mlp(32, 64, 32))
    found = diff(plain, inspected(model=model))
    assert found.changes == []
    assert set(found.only_after) == {f"layers.2.{i}:{r}" for i in (0, 2) for r in ("output", "grad_input", "grad_weight")}
    assert len(found.only_after) == 6
    assert bool(found)
    assert "6 are only in the second: layers.2.0:output" in str(found)


def test_saved_inspections_another_version_and_gemms_that_are_matched_by_likeness(plain):
    saved = json.loads(json.dumps(plain.to_dict()))
    assert not diff(saved, plain)
    other = copy.deepcopy(saved)
    for gemm in other["gemms"]:
        if gemm["reason"]:
            gemm["reason"] += " and 3"
    assert not diff(saved, other), "numbers of reasons"
    other["versions"]["torch"] = "2.99.0"
    other["gemms"][0] |= {"quantized": False, "reason": "hardware: gone", "recipe": None}
    found = diff(saved, other)
    (change,) = found.changes
    assert change.causes == (f"version of torch: {torch.__version__} -> 2.99.0",)
    assert json.loads(json.dumps(found.to_dict()))["changes"][0]["after"]["reason"] == "hardware: gone"
    other["versions"] = saved["versions"]
    assert diff(saved, other).changes[0].causes[0].startswith("the graph around it")
    twice = copy.deepcopy(saved)
    extra = twice["gemms"][0] | {"m": 99, "quantized": False, "reason": "slow: 0.5", "recipe": None}
    twice["gemms"].insert(0, extra)
    found = diff(saved, twice)
    assert (found.changes, found.only_after) == ([], [f"{extra['module']}:{extra['role']}"])


def test_the_table_folds_equal_layers_and_the_page_escapes(plain):
    found = diff(plain, inspected(rules={"layers.*.0:output": None}))
    assert "layers.0-1.0 (x2)" in str(found)
    assert repr(found) == str(found).rstrip("\n")
    found.changes[0] = type(found.changes[0])(**{**vars(found.changes[0]), "module": "<b>"})
    assert "<b>" not in found._repr_html_()
    assert "&lt;b&gt;" in found._repr_html_()


@pytest.mark.parametrize("wrong", [3, None, [], {}, {"gemms": []}])
def test_what_is_no_inspection_or_has_not_run(plain, wrong):
    with pytest.raises(OptionError, match=r"the second argument of diff is a \w+.*inspect\(compiled\)"):
        diff(plain, wrong)
    with pytest.raises(OptionError, match="the first inspection has no GEMM: run the model"):
        diff(inspect(fp8_compile(mlp(), backend="aot_eager")), plain)
