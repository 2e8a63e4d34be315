"""Words and objects that people bring from other projects: the error names what they are called here."""

import dataclasses
import enum
import functools
import pathlib
import re

import pytest
import torch

import fp8pass
from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile
from fp8pass.errors import Fp8Warning, RecipeError, RuleError
from fp8pass.recipes import PRESETS, as_recipe
from fp8pass.recipes.recipe import WORDS
from fp8pass.rules import ROLE_WORDS, ROLES, parse_rules
from tests.support.cases import each
from tests.support.models import Stack, mlp

MOE = "torchao.prototype.moe_training.config"
ROOT = pathlib.Path(__file__).parents[2]


#: A name of ours -> what it is called elsewhere.
RECIPE_WORDS = {
    "current": "tensorwise TensorWise dynamic per_tensor per-tensor",
    "blockwise": "deepseek DeepSeek-V3",
    "delayed": "fp8 DelayedScaling delaid",
    "rowwise": "axiswise per_row",
    "mxfp8": "microscaling",
}
ROLE_NAMES = {"output": "fprop outptu", "grad_input": "dgrad", "grad_weight": "wgrad WGRAD weight_grad"}


def rows(words):
    return [(word, name) for name, text in words.items() for word in text.split()]


@each("word, name", rows(RECIPE_WORDS))
def test_words_for_recipes(word, name):
    message = rf"no recipe is called '{word}'\. Did you mean '{name}'\? Use one of delayed"
    for refuse in (as_recipe, lambda w: fp8_compile(mlp(), w), lambda w: parse_rules("current", {"up": w})):
        with pytest.raises((RecipeError, RuleError), match=message):
            refuse(word)


@each("word, role", rows(ROLE_NAMES))
def test_words_for_roles(word, role):
    with pytest.raises(RuleError, match=rf"names the role '{word}'\. Did you mean '{role}'\? Roles are output"):
        parse_rules("current", {f"layers.*:{word}": None})


def test_every_word_stands_for_a_name_of_ours_and_none_is_one():
    for words, names in ((WORDS, PRESETS), (ROLE_WORDS, ROLES)):
        assert set(words.values()) <= set(names)
        assert not set(words) & set(names)
        assert all(re.fullmatch(r"[a-z0-9_]+", word) for word in words)


# -- patterns


#: Meant -> as Python and others write it.
PATTERNS = {
    "layers.0.*": "layers[0] layers.0",
    "layers.0.2": "layers[0].2 layers[0][2] layers.0.2.weight 0.2",
    "layers.1.2": "layers.7.2",
    "layers.1.*": "layers[-1].*",
    "layers.*.2": "layers.{0,1}.2",
    "layers.[0-1].2": "layers.0-1.2",
    "layers.*.2:output": "layers.0-31.2:output",
    "layers.1.*:grad_weight": "layers[1]:grad_weight",
    "layers.0.2:grad_weight": "layers.0.2.wgrad",
    "*:grad_weight": "wgrad",
    "*:grad_input": "grad_input",
}


def run(rules, **options):
    compiled = fp8_compile(Stack([mlp(), mlp()]), "current", backend="aot_eager", rules=rules, **options)
    compiled(torch.randn(16, 64)).sum().backward()
    return fp8pass.inspect(compiled)


@each("pattern, meant", rows(PATTERNS))
def test_patterns_as_python_writes_them(pattern, meant):
    said = re.escape(f"did you mean {meant!r}?")
    with pytest.warns(Fp8Warning, match=said):
        found = run({pattern: None})
    assert re.search(said, re.sub(r"\s+", " ", str(found)))
    torch._dynamo.reset()
    assert not run({meant: None}, strict=True).unmatched_rules


def test_a_set_of_characters_stays_one():
    found = run({"layer[s].[1].*": None}, strict=True)
    assert {g.module for g in found.gemms if not g.quantized} == {"layers.1.0", "layers.1.2"}


# -- objects


def theirs(kind, package, **fields):
    """An object of a class with this name, in this module, with these attributes."""
    return type(kind, (), {"__module__": package, **fields})()


class TheirFormat(enum.Enum):
    E4M3 = 1
    HYBRID = 2


TheirFormat.__module__ = "transformer_engine.common.recipe"
TE, AO = "transformer_engine.common.recipe", "torchao.float8.config"
te = functools.partial(theirs, package=TE)
linear_config = functools.partial(theirs, "Float8LinearConfig", AO)


@dataclasses.dataclass
class MMParams:
    use_split_accumulator: bool


def granularity(name):
    return theirs("CastConfig", AO, scaling_granularity=theirs("ScalingGranularity", AO, name=name))


DISABLED = theirs("CastConfig", AO, scaling_type=theirs("ScalingType", AO, name="DISABLED"))


MARGINS = {"margin": 2, "fp8_format": TheirFormat.E4M3, "amax_compute_algo": "most_recent"}
OURS = r"margin=2, fp8_format=fp8pass\.Format\.E4M3, amax_compute_algo='most_recent'"
ACCURATE = {"fp8_gemm_dgrad": MMParams(False), "fp8_gemm_fprop": MMParams(False)}
ROWS = {"cast_config_weight": granularity("AXISWISE")}


@each(
    "value, equivalent",
    [
        (te("DelayedScaling", margin=0, amax_history_len=1024), r"fp8pass\.DelayedScaling\(\)"),
        (te("DelayedScaling", **MARGINS), rf"fp8pass\.DelayedScaling\({OURS}\)"),
        (te("Float8CurrentScaling", **ACCURATE), r"fp8pass\.Float8CurrentScaling\(fast_accum_grad_input=True\)"),
        (te("Float8BlockScaling"), r"fp8pass\.Float8BlockScaling\(\)"),
        (te("MXFP8BlockScaling"), r"fp8pass\.MXFP8BlockScaling\(\)"),
        (type(te("DelayedScaling")), r"fp8pass\.DelayedScaling\(\)"),
        (te("CustomRecipe"), "docs/recipes.md"),
        (te("NVFP4BlockScaling"), "it has no equivalent here"),
        (te("DelayedScaling", margin=0.5), r"fp8pass\.DelayedScaling\(\), but not with these options: .*margin=0\.5"),
        (linear_config(), "'current'"),
        (linear_config(**ROWS), "'rowwise'"),
        (linear_config(**ROWS, cast_config_input_for_grad_weight=DISABLED), "'rowwise_with_gw_hp'"),
        (linear_config(round_scales_to_power_of_2=True), r"fp8pass\.Float8CurrentScaling\(use_power_2_scales=True\)"),
        (theirs("Float8LinearRecipeName", AO, value="tensorwise"), "'current'"),
        (theirs("Float8LinearRecipeName", AO, value="rowwise"), "'rowwise'"),
        (theirs("MXLinearConfig", "torchao.prototype.mx_formats"), "'mxfp8'"),
        (theirs("MXFP8TrainingRecipe", MOE, value="mxfp8_rceil_wgrad_with_hp"), "'mxfp8_with_gw_hp'"),
        (theirs("MXFP8TrainingRecipe", MOE, value="mxfp8_rceil"), "'mxfp8'"),
        (theirs("MXFP8TrainingOpConfig", MOE, wgrad_with_hp=True), "'mxfp8_with_gw_hp'"),
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
    written = re.search(r"equivalent is ('\w+'|fp8pass\.[\w.]+\(.*?\)) \(docs", str(error.value))
    if written is not None and "but not" not in written[1]:
        as_recipe(eval(written[1], {"fp8pass": fp8pass}))


def test_a_format_of_theirs_is_named_too_and_a_recipe_of_ours_may_live_anywhere():
    for make in (DelayedScaling, Float8CurrentScaling):
        with pytest.raises(RecipeError, match=r"this is transformer_engine's; use fp8pass\.Format\.HYBRID"):
            make(fp8_format=TheirFormat.HYBRID)
    own = type("Own", (Float8CurrentScaling,), {"__module__": "torchao.mine"})()
    assert as_recipe(own) is own


# -- examples


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_do_not_shadow_the_standard_library(path):
    """A name such as `inspect` or `state` is read as `fp8pass.inspect`: the first is a module of Python's."""
    text = path.read_text()
    assert not re.search(r"^\s*from fp8pass import", text, re.MULTILINE)
    assert "fp8_compile(" not in text or re.search(r"^import fp8pass$", text, re.MULTILINE)
