"""Words and objects that people bring from other projects: the error names what they are called here."""

import dataclasses
import enum
import functools
import pathlib
import re

import pytest
import torch

import fp8pass
from fp8pass import Float8CurrentScaling, fp8_compile
from fp8pass.errors import Fp8Warning, RecipeError, RuleError
from fp8pass.recipes import as_recipe
from fp8pass.rules import parse_rules
from tests.support.cases import each
from tests.support.models import Stack, mlp

MOE = "torchao.prototype.moe_training.config"
ROOT = pathlib.Path(__file__).parents[2]


@each("word, name", [("TensorWise", "current"), ("DeepSeek-V3", "blockwise"), ("delaid", "delayed")])
def test_words_for_recipes(word, name):
    message = rf"no recipe is called '{word}'\. Did you mean '{name}'\? Use one of delayed"
    for refuse in (as_recipe, lambda w: parse_rules("current", {"up": w})):
        with pytest.raises((RecipeError, RuleError), match=message):
            refuse(word)


PATTERNS = {
    "layers[0]": "layers.0.*",
    "layers.0.2.weight": "layers.0.2",
    "layers[-1].*": "layers.1.*",
    "layers.{0,1}.2": "layers.*.2",
    "layers.0-31.2:output": "layers.*.2:output",
    "wgrad": "*:grad_weight",
}


def run(rules, **options):
    compiled = fp8_compile(Stack([mlp(), mlp()]), "current", backend="aot_eager", rules=rules, **options)
    compiled(torch.randn(16, 64)).sum().backward()
    return fp8pass.inspect(compiled)


@each("pattern, meant", PATTERNS.items())
def test_patterns_as_python_writes_them(pattern, meant):
    said = re.escape(f"did you mean {meant!r}?")
    with pytest.warns(Fp8Warning, match=said):
        found = run({pattern: None})
    assert re.search(said, re.sub(r"\s+", " ", str(found)))
    torch._dynamo.reset()
    assert not run({meant: None}, strict=True).unmatched_rules


def theirs(kind, package, **fields):
    """An object of a class with this name, in this module, with these attributes."""
    return type(kind, (), {"__module__": package, **fields})()


TE, AO = "transformer_engine.common.recipe", "torchao.float8.config"
TheirFormat = enum.Enum("TheirFormat", "E4M3 HYBRID", module=TE)
MMParams = dataclasses.make_dataclass("MMParams", ["use_split_accumulator"])
te = functools.partial(theirs, package=TE)
linear_config = functools.partial(theirs, "Float8LinearConfig", AO)


MARGINS = {"margin": 2, "fp8_format": TheirFormat.E4M3, "amax_compute_algo": "most_recent"}
OURS = r"margin=2, fp8_format=fp8pass\.Format\.E4M3, amax_compute_algo='most_recent'"
ACCURATE = {"fp8_gemm_dgrad": MMParams(False), "fp8_gemm_fprop": MMParams(False)}
DISABLED = theirs("CastConfig", AO, scaling_type=theirs("ScalingType", AO, name="DISABLED"))
ROWS = {"cast_config_weight": theirs("Config", AO, scaling_granularity=theirs("Granularity", AO, name="AXISWISE"))}


@each(
    "value, equivalent",
    [
        (te("DelayedScaling", **MARGINS), rf"fp8pass\.DelayedScaling\({OURS}\)"),
        (te("Float8CurrentScaling", **ACCURATE), r"fp8pass\.Float8CurrentScaling\(fast_accum_grad_input=True\)"),
        (te("CustomRecipe"), "docs/recipes.md"),
        (te("NVFP4BlockScaling"), "it has no equivalent here"),
        (te("DelayedScaling", margin=0.5), r"fp8pass\.DelayedScaling\(\), but not with these options: .*margin=0\.5"),
        (linear_config(**ROWS, cast_config_input_for_grad_weight=DISABLED), "'rowwise_with_gw_hp'"),
        *((linear_config(**ROWS), "'rowwise'"), (linear_config(round_scales_to_power_of_2=True), "use_power_2_scales=True")),
        (theirs("Float8LinearRecipeName", AO, value="tensorwise"), "'current'"),
        (theirs("MXLinearConfig", "torchao.prototype.mx_formats"), "'mxfp8'"),
        (theirs("MXFP8TrainingRecipe", MOE, value="mxfp8_rceil_wgrad_with_hp"), "'mxfp8_with_gw_hp'"),
    ],
)
def test_objects_of_other_projects_have_their_equivalent_named(value, equivalent):
    with pytest.raises(RecipeError, match=equivalent) as error:
        fp8_compile(mlp(), value)
    package = value.__module__.partition(".")[0]
    assert f" of {package}; " in str(error.value)
    assert (ROOT / re.search(r"\((docs/\S+) lists", str(error.value))[1]).is_file()
    with pytest.raises(RuleError, match=equivalent):
        parse_rules("current", {"up": value})


def test_a_format_of_theirs_is_named_too_and_a_recipe_of_ours_may_live_anywhere():
    with pytest.raises(RecipeError, match=r"this is transformer_engine's; use fp8pass\.Format\.HYBRID"):
        Float8CurrentScaling(fp8_format=TheirFormat.HYBRID)
    own = type("Own", (Float8CurrentScaling,), {"__module__": "torchao.mine"})()
    assert as_recipe(own) is own
