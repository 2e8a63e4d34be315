"""Recipes and rules: names, defaults, and refusals that name value and fix."""

import dataclasses

import pytest
import torch

import fp8pass
from fp8pass import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Format, MXFP8BlockScaling
from fp8pass.errors import RecipeError
from fp8pass.recipes import as_recipe
from fp8pass.rules import parse_rules
from tests.support.cases import each


def test_defaults_are_transformer_engines_and_torchaos():
    hybrid, e4m3 = {"fp8_format": Format.HYBRID}, {"fp8_format": Format.E4M3}
    delayed = {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max", "scaling_factor_compute_algo": None}
    delayed |= {"reduce_amax": True, "initial_scale": "current"}  # the last is ours: TransformerEngine's is "one"
    block = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1, "use_f32_scales": False}
    rowwise = {"use_power_2_scales": True, "amax_epsilon": 0.0, "high_precision_grad_weight": False}
    override = {"backward_override": None}
    fast = {"fast_accum_output": True, "fast_accum_grad_input": False, "fast_accum_grad_weight": False} | override
    for recipe, defaults in (
        (DelayedScaling(), delayed | hybrid | fast),
        (Float8CurrentScaling(), {"use_power_2_scales": False, "amax_epsilon": 0.0} | hybrid | fast),
        (Float8BlockScaling(), block | {"amax_epsilon": 0.0} | e4m3 | override),
        (MXFP8BlockScaling(), {"enable_2d_quantization": False} | e4m3 | override),
        (Float8RowwiseScaling(), rowwise | fast),
    ):
        assert dataclasses.asdict(recipe) == defaults


@each(
    ("make", "message"),
    [
        (lambda: DelayedScaling(amax_history_len=0), r"amax_history_len=0\): use an int of at least 1"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "no GEMM takes two E5M2 operands; use Format.HYBRID"),
        (lambda: DelayedScaling(fp8_format="HYBRID"), r"'HYBRID'\): use Format.HYBRID .*from fp8pass import Format"),
        (lambda: DelayedScaling(amax_history_length=4), "no option 'amax_history_length'. Did you mean 'amax_history_len'"),
        (lambda: DelayedScaling(0), "keyword options only"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), "finite number of 0.0 or more"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), "use 1 .* or 2"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "128x128 by 128x128"),
        (lambda: as_recipe("delaid"), "Did you mean 'delayed'"),
        (lambda: as_recipe(DelayedScaling), r"write DelayedScaling\(\)"),
    ],
)
def test_meaningless_recipes_are_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_first_match_wins():
    rules = parse_rules("delayed", {"layers.*.mlp.*:output": "current", "layers.0.*": None, "layers.*": "blockwise"})
    assert rules.recipe_for("layers.0.mlp.up", "output").name == "current"
    assert rules.recipe_for("layers.0.mlp.up", "grad_input") is None
    assert rules.recipe_for("layers.1.attn.wq", "grad_weight").name == "blockwise"
    assert rules.recipe_for("lm_head", "output").name == "delayed"
    assert [r.name for r in rules.recipes] == ["delayed", "current", "blockwise"]


def test_amax_epsilon_reaches_the_casts():
    """With amaxes taken for 448 the scale is 1: operands are only cast."""
    model = torch.nn.Linear(64, 48, bias=False)
    x = torch.randn(32, 64) / 8
    compiled = fp8pass.fp8_compile(model, fp8pass.Float8CurrentScaling(amax_epsilon=448.0), backend="aot_eager")
    cast = [t.detach().to(torch.float8_e4m3fn).float() for t in (x, model.weight)]
    torch.testing.assert_close(compiled(x).detach(), cast[0] @ cast[1].t(), rtol=1e-6, atol=1e-6)
