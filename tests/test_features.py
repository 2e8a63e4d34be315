"""The tables of docs/features.md, features by recipe and GEMMs by GPU, are those of the code."""

import dataclasses
import itertools
import pathlib
import re
import types
from typing import get_args

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.errors import ExportError, RecipeError
from fp8pass.recipes import as_recipe
from fp8pass.recipes.engines import Engine, matching
from lowering.hardware import Gemm, Platform, refusal
from lowering.paths import GemmPath, path_of
from tests.support.cases import each, rest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "features.md"
WIDTH = 256


def rows(first):
    """Text of the first column, without links and code marks -> cells by heading, of the table whose first heading is given."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    cells = [
        [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell.replace("`", "")).strip() for cell in line.split("|")[1:-1]]
        for line in lines[start:]
    ]
    end = next(i for i, row in enumerate(cells) if not row)
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:end]}


FEATURES, HARDWARE = rows("feature"), rows("recipe")
RECIPES = list(next(iter(FEATURES.values())))


def make_model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)).bfloat16()


def trained(recipe, model=None, **options):
    torch._dynamo.reset()
    compiled = fp8pass.fp8_compile(model or make_model(), recipe, backend="aot_eager", **options)
    compiled(torch.randn(128, WIDTH, dtype=torch.bfloat16, requires_grad=True)).square().mean().backward()
    return compiled


def bytes_per_parameter(compiled):
    (graph, *_) = fp8pass.inspect(compiled).graphs
    return str(sum(weight.bytes for weight in graph.kept) // (2 * WIDTH**2))


def quantization_of(kind, recipe, role="output"):
    return as_recipe(recipe).quantization(types.SimpleNamespace(kind=kind, value=None), role)


def forward_gemm(recipe, **options):
    a, b = (quantization_of(kind, recipe) for kind in ("input", "weight"))
    return Gemm(a.dtype, b.dtype, a.granularity, b.granularity, **options)


def state(recipe):
    return "scales and histories" if as_recipe(recipe).keeps_state else "none"


def works(function, error):
    """Whether a call of the function does not raise the error."""
    try:
        function()
    except error:
        return "no"
    return "yes"


def backward_override(recipe):
    return works(lambda: dataclasses.replace(as_recipe(recipe), backward_override="dequantized"), RecipeError)


def saved_activations(recipe):
    graphs = [fp8pass.inspect(trained(chosen, saved_activations="fp8")).graphs[0] for chosen in (recipe, None)]
    saved = [[value for value in graph.saved if value.reason is None] for graph in graphs]
    return "yes" if all(saved) else "no"


def compressed_tensors(recipe):
    written = dict(fp8pass.state_dict_fp8(trained(recipe)))
    if "0.input_scale" in written:
        return "static scales"
    return {
        (1,): "dynamic scales",
        (WIDTH, 1): "scales per row",
        (WIDTH // 128, WIDTH // 128): "128x128 blocks",
        (WIDTH, WIDTH // 32): "groups of 32",
    }[tuple(written["0.weight_scale"].shape) or (1,)]


def fp8_format(recipe):
    return works(lambda: dict(fp8pass.state_dict_fp8(trained(recipe), format="fp8")), ExportError)


def match(recipe):
    chosen = fp8pass.Float8BlockScaling(use_f32_scales=True) if recipe == "blockwise" else as_recipe(recipe)
    engines = [engine for engine in get_args(Engine) if works(lambda: matching(chosen, engine), RecipeError) == "yes"]  # noqa: B023
    return ", ".join(engines) or "no"


def experts(recipe):
    gemm = forward_gemm(recipe, is_grouped=True, num_groups=4)
    on_gpus = [refusal(gemm, Platform(c, (13, 0), (2, 13))) is None for c in ((8, 9), (9, 0), (10, 0))]
    return "yes" if all(on_gpus) else "on a CPU; on GPUs in high precision"


CHECKS = {
    "state": state,
    "backward_override": backward_override,
    "saved activations": saved_activations,
    "cached weights": lambda recipe: bytes_per_parameter(trained(recipe, weight_copies="cache")),
    "released weights": lambda recipe: bytes_per_parameter(
        trained(recipe, make_model().requires_grad_(False), release_frozen=True)
    ),
    "export as compressed-tensors": compressed_tensors,
    'export in format "fp8"': fp8_format,
    "match": match,
    "experts": experts,
}
#: By tests/fp8pass and, on two ranks, by tests/distributed.
ELSEWHERE = ("rules", "FP8 gathers of FSDP2", "FP8 gathers of activations")


CELLS = list(itertools.product(CHECKS, RECIPES))


def test_every_row_is_checked():
    known = sorted([*CHECKS, *ELSEWHERE])
    assert sorted(next(name for name in known if row.startswith(name)) for row in FEATURES) == known


@pytest.mark.parametrize(("feature", "recipe"), [*CELLS[::2], *rest(CELLS[1::2])])
def test_a_feature_by_recipe(feature, recipe):
    cell = next(row for name, row in FEATURES.items() if name.startswith(feature))[recipe]
    assert CHECKS[feature](recipe) == cell


WORDS = {
    None: "refused",
    GemmPath.TENSORS: "torch._scaled_mm",
    GemmPath.ROWS: "torch._scaled_mm",
    GemmPath.ROWS_AFTERWARDS: "one scale per tensor into float32",
    GemmPath.BLOCKS: "cuBLASLt with CUDA 12.9",
    GemmPath.BLOCKS_BY_TRITON: "a Triton GEMM",
    GemmPath.BLOCKS_BY_MXFP8: "MXFP8 GEMMs with the same numbers",
    GemmPath.MXFP8: "torch._scaled_mm with CUDA 12.8",
}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
@each("recipe", [name for row in HARDWARE for name in row.split(", ")])
def test_the_gemm_of_a_recipe_on_a_gpu(recipe, capability):
    row = next(row for name, row in HARDWARE.items() if recipe in name.split(", "))
    cell = next(text for heading, text in row.items() if heading.startswith(f"{capability[0]}.{capability[1]}"))
    gemm = forward_gemm(recipe)
    assert WORDS[path_of(gemm, Platform(capability, (13, 0), (2, 13)), fast_accum=True)] in cell
