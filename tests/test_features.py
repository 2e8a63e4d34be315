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
from fp8pass.errors import ExportError, Reason, RecipeError
from fp8pass.recipes import as_recipe
from fp8pass.recipes.engines import Engine, matching
from fp8pass.schemes import scheme_of
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


def trained(model, recipe, **options):
    torch._dynamo.reset()
    compiled = fp8pass.fp8_compile(model, recipe, backend="aot_eager", **options)
    for _ in range(2):
        compiled(torch.randn(128, WIDTH, dtype=torch.bfloat16, requires_grad=True)).square().mean().backward()
    return compiled


def quantization_of(kind, recipe, role="output"):
    return as_recipe(recipe).quantization(types.SimpleNamespace(kind=kind, value=None), role)


def forward_gemm(recipe, **options):
    a, b = (quantization_of(kind, recipe) for kind in ("input", "weight"))
    return Gemm(a.dtype, b.dtype, a.granularity, b.granularity, **options)


def state(recipe):
    return "scales and histories" if as_recipe(recipe).keeps_state else "none"


def rules(recipe):
    compiled = trained(make_model(), recipe, rules={"0": None}, schedule={1: {"2:grad_weight": None}})
    with fp8pass.monitor(compiled, every=1) as monitor:
        compiled(torch.randn(128, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
    kept = [(gemm.module, gemm.role) for gemm in fp8pass.inspect(compiled).gemms if not gemm.quantized]
    fp8pass.suggest_rules(make_model().float(), lambda m: m(torch.ones(32, WIDTH)).sum(), recipe, checks=0, progress=False)
    return "yes" if kept == [("2", "grad_weight")] and monitor.latest.tensors else "no"


def backward_override(recipe):
    try:
        dataclasses.replace(as_recipe(recipe), backward_override="dequantized")
    except RecipeError:
        return "no"
    return "yes"


def saved_activations(recipe):
    for chosen in (recipe, None):
        (graph,) = fp8pass.inspect(trained(make_model(), chosen, saved_activations="fp8")).graphs
        if all(value.reason is not None for value in graph.saved):
            return "no"
    return "yes"


def cached(recipe):
    (graph, *_) = fp8pass.inspect(trained(make_model(), recipe, weight_copies="cache")).graphs
    return str(sum(weight.bytes for weight in graph.kept) // (2 * WIDTH**2))


def released(recipe):
    model = make_model().requires_grad_(False)
    (graph, *_) = fp8pass.inspect(trained(model, recipe, release_frozen=True)).graphs
    return str(sum(weight.bytes for weight in graph.kept) // (2 * WIDTH**2))


def fsdp_gather(recipe):
    quantization = quantization_of("weight", recipe)
    scheme = scheme_of(quantization)
    conditions = []
    if isinstance(scheme.shard_obstacle(dataclasses.replace(quantization, same_on_ranks=False), True), Reason):
        conditions.append("with reduce_amax=True")
    if not scheme.has_one_copy(quantization):
        conditions.append("with reshard_after_forward=True")
    sent = {n: scheme.sharded(quantization, n, n * WIDTH, True) for n in (16, 32, 64, 128)}
    whole = next((n for n in sent if not isinstance(sent[n], Reason)), None)
    if whole != 16:
        conditions.append(f"rows per rank a multiple of {whole}")
    high_precision = "rowwise_with_gw_hp"  # its backward needs another copy, with a scale of its own
    if recipe == "rowwise" and quantization_of("weight", high_precision) != quantization_of(
        "weight", high_precision, "grad_input"
    ):
        conditions.append('not "rowwise_with_gw_hp"')
    return "; ".join(conditions) or "yes"


def compressed_tensors(recipe):
    written = dict(fp8pass.state_dict_fp8(trained(make_model(), recipe)))
    if "0.input_scale" in written:
        return "static scales"
    return {
        (1,): "dynamic scales",
        (WIDTH, 1): "scales per row",
        (WIDTH // 128, WIDTH // 128): "128x128 blocks",
        (WIDTH, WIDTH // 32): "groups of 32",
    }[tuple(written["0.weight_scale"].shape) or (1,)]


def fp8_format(recipe):
    try:
        dict(fp8pass.state_dict_fp8(trained(make_model(), recipe), format="fp8"))
    except ExportError:
        return "no"
    return "yes"


def match(recipe):
    chosen = fp8pass.Float8BlockScaling(use_f32_scales=True) if recipe == "blockwise" else as_recipe(recipe)
    found = []
    for engine in get_args(Engine):
        try:
            matching(chosen, engine)
        except RecipeError:
            continue
        found.append(engine)
    return ", ".join(found) or "no"


def experts(recipe):
    gemm = forward_gemm(recipe, is_grouped=True, num_groups=4)
    on_gpus = [refusal(gemm, Platform(c, (13, 0), (2, 13))) is None for c in ((8, 9), (9, 0), (10, 0))]
    return "yes" if all(on_gpus) else "on a CPU; on GPUs in high precision"


CHECKS = {
    "state": state, "rules": rules, "backward_override": backward_override, "saved activations": saved_activations,
    "cached weights": cached, "released weights": released, "FP8 gathers of FSDP2": fsdp_gather,
    "export as compressed-tensors": compressed_tensors, 'export in format "fp8"': fp8_format, "match": match,
    "experts": experts,
}  # fmt: skip
ELSEWHERE = "FP8 gathers of activations"
"""By tests/distributed/test_activation_all_gather.py, on two ranks."""


def test_every_row_is_checked():
    assert [next(c for c in [*CHECKS, ELSEWHERE] if row.startswith(c)) for row in FEATURES]
    assert len(FEATURES) == len(CHECKS) + 1


CELLS = list(itertools.product(CHECKS, RECIPES))
FAST = CELLS[::2]  # of five recipes


@pytest.mark.parametrize(("feature", "recipe"), [*FAST, *rest(cell for cell in CELLS if cell not in FAST)])
def test_a_feature_by_recipe(feature, recipe):
    cell = next(row for name, row in FEATURES.items() if name.startswith(feature))[recipe]
    assert "; ".join(sorted(cell.split("; "))) == "; ".join(sorted(CHECKS[feature](recipe).split("; ")))


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
