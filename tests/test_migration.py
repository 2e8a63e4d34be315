"""Pages for users of torchao and TransformerEngine name the options of the latter, and only options of ours that exist."""

import inspect
import pathlib
import re

import pytest

import fp8pass
from fp8pass import fp8_compile

ROOT = pathlib.Path(__file__).parents[1]


#: Read from transformer_engine/common/recipe/__init__.py and pytorch/quantization.py at d0067d0 (2.20.0.dev0).
TRANSFORMER_ENGINE = """
    margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha
    backward_override
    use_power_2_scales fp8_quant_fwd_inp fp8_quant_fwd_weight fp8_quant_bwd_grad fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad
    power_2_scale amax_epsilon random_hadamard_transform stochastic_rounding fp4_2d_quantization use_split_accumulator
    use_f32_scales x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim enable_2d_quantization
    DelayedScaling Float8CurrentScaling MXFP8BlockScaling Float8BlockScaling NVFP4BlockScaling CustomRecipe
    autocast enabled calibrating recipe amax_reduction_group fp8_autocast
    fp8_model_init quantized_model_init preserve_high_precision_init_val is_first_microbatch
"""


def test_every_option_of_transformer_engine_is_in_its_migration_page():
    page = (ROOT / "docs/coming-from-transformer-engine.md").read_text()
    assert [option for option in TRANSFORMER_ENGINE.split() if not re.search(rf"\b{option}\b", page)] == []


@pytest.mark.parametrize("page", ["coming-from-torchao", "coming-from-transformer-engine"])
def test_options_that_a_migration_page_names_exist(page):
    """A name in the column "here" is an option of a recipe or of `fp8_compile`."""
    recipes = [getattr(fp8pass, name) for name in fp8pass.__all__ if name.endswith("Scaling")]
    known = {option for recipe in recipes for option in inspect.signature(recipe).parameters}
    known |= set(inspect.signature(fp8_compile).parameters)
    text = (ROOT / f"docs/{page}.md").read_text()
    cells = [row.split(" | ")[-1] for row in text.splitlines() if row.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)=", cell)}
    assert named <= known
    assert named
