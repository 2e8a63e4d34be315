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
    delayed = {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max"}
    delayed |= {"scaling_factor_compute_algo": None, "reduce_amax": True}
    override = {"backward_override": None}
    delayed |= {"initial_scale": "current"}  # ours: TransformerEngine's is "one"
    current = {"fp8_format": Format.HYBRID, "use_power_2_scales": False, "amax_epsilon": 0.0}
    block = {"fp8_format": Format.E4M3, "x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
    block |= {"use_f32_scales": False, "amax_epsilon": 0.0}
    accumulation = {"fast_accum_output": True, "fast_accum_grad_input": False, "fast_accum_grad_weight": False}
    assert dataclasses.asdict(DelayedScaling()) == delayed | accumulation | override
    assert dataclasses.asdict(Float8CurrentScaling()) == current | accumulation | override
    assert dataclasses.asdict(Float8BlockScaling()) == block | override
    mxfp8 = {"fp8_format": Format.E4M3, "enable_2d_quantization": False}
    assert dataclasses.asdict(MXFP8BlockScaling()) == mxfp8 | override
    rowwise = {"use_power_2_scales": True, "amax_epsilon": 0.0, "high_precision_grad_weight": False}
    rowwise |= {"backward_override": None}  # TransformerEngine's
    accumulation = {"fast_accum_output": True, "fast_accum_grad_input": False, "fast_accum_grad_weight": False}
    assert dataclasses.asdict(Float8RowwiseScaling()) == rowwise | accumulation


def test_formats_and_recipes_are_values():
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert (Format.E4M3.forward, Format.E4M3.backward) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    recipe = DelayedScaling(margin=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 2
    assert hash(recipe) == hash(DelayedScaling(margin=1))
    assert recipe != DelayedScaling()


@each(
    ("make", "message"),
    [
        (lambda: DelayedScaling(amax_history_len=0), r"amax_history_len=0\): use an int of at least 1"),
        (lambda: DelayedScaling(amax_history_len=-5), "at least 1"),
        (lambda: DelayedScaling(amax_history_len=4.0), "at least 1"),
        (lambda: DelayedScaling(amax_history_len=True), "at least 1"),
        (lambda: DelayedScaling(margin=0.5), "margin"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "no GEMM takes two E5M2 operands; use Format.HYBRID"),
        (lambda: DelayedScaling(fp8_format="HYBRID"), r"'HYBRID'\): use Format.HYBRID .*from fp8pass import Format"),
        (lambda: DelayedScaling(amax_compute_algo="most-recent"), "Did you mean 'most_recent'"),
        (lambda: DelayedScaling(initial_scale="curent"), r"initial_scale.*Did you mean 'current'"),
        (lambda: DelayedScaling(scaling_factor_compute_algo="max"), "use a function or None"),
        (lambda: DelayedScaling(reduce_amax=1), "use True or False"),
        (lambda: DelayedScaling(amax_history_length=4), "no option 'amax_history_length'. Did you mean 'amax_history_len'"),
        (lambda: DelayedScaling(0), "keyword options only"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), "finite number of 0.0 or more"),
        (lambda: Float8CurrentScaling(amax_epsilon=float("nan")), "finite number"),
        (lambda: Float8CurrentScaling(use_power_2_scales="yes"), "use True or False"),
        (lambda: Float8CurrentScaling(margin=1), "no option 'margin'"),
        (lambda: Float8RowwiseScaling(fp8_format=Format.HYBRID), "no option 'fp8_format'"),
        (lambda: Float8RowwiseScaling(high_precision_grad_weight=None), "use True or False"),
        (lambda: Float8RowwiseScaling(amax_epsilon=-1e-12), "finite number of 0.0 or more"),
        (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2), "no GEMM takes two E5M2 operands"),
        (lambda: MXFP8BlockScaling(enable_2d_quantization=1), r"enable_2d_quantization=1\): use True or False"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), "use 1 .* or 2"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "128x128 by 128x128"),
        (lambda: Float8BlockScaling(fast_accum_output=True), "no option 'fast_accum_output'"),
        (lambda: as_recipe("delaid"), "Did you mean 'delayed'"),
        (lambda: as_recipe(DelayedScaling), r"write DelayedScaling\(\)"),
        (lambda: as_recipe(None), "use a recipe object"),
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
