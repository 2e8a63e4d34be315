"""Every recipe end to end: a block through Inductor and with CUDA graphs, and a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.contestants import replayed, steady
from benchmarks.correctness import BLOCK_DB, require_fp8, require_step, run_step
from benchmarks.isolation import Bench
from benchmarks.models import Experts, LlamaBlock
from benchmarks.part0.cases import Case, Found, skip_if
from benchmarks.part0.operations import mx_obstacle
from fp8pass import fp8_compile, inspect
from fp8pass.recipes import PRESETS

#: dB of one GEMM; the gradients' operands in E5M2 (tests/tolerances.py).
_GEMM_DB = {"output_db": 25.0, "gradient_db": 18.0}
#: Steps: with CUDA graphs the first ones warm up and record.
_STEPS = 5


def cases(on: torch.device) -> Iterator[Case]:
    """The cases of all recipes."""
    for recipe in PRESETS:
        yield Case(f"{recipe}, Inductor", functools.partial(_block, recipe, on, None))
        yield Case(f"{recipe}, CUDA graphs", functools.partial(_block, recipe, on, "reduce-overhead"))
        yield Case(f"{recipe}, experts", functools.partial(_experts, recipe, on))


def _checked(
    recipe: str, model: nn.Module, x: torch.Tensor, dy: torch.Tensor, num_gemms: int, mode: str | None, **bounds: Any
) -> Found:
    """Steps of the compiled model beside one in bfloat16. All of its GEMMs run in FP8, but for a third of them under recipes
    whose name says that grad_weight is in high precision."""
    skip_if(mx_obstacle(x.device) if recipe.startswith("mxfp8") else None)
    torch._dynamo.reset()
    expected = run_step(model, x, dy)
    compiled = fp8_compile(model, steady(recipe), mode=mode)
    call: Any = compiled if mode is None else replayed(compiled)
    for _ in range(_STEPS - 1):
        run_step(call, x, dy)
    bench = Bench()
    require_step(recipe, expected, run_step(call, x, dy), bench, **bounds)
    quantized = sum(gemm.quantized for gemm in inspect(compiled).gemms)
    if recipe.endswith("_hp"):
        bench.require(quantized > 0, f"{recipe}: {quantized} GEMMs in FP8")
    else:
        require_fp8(recipe, compiled, num_gemms, bench)
    return {"GEMMs in FP8": quantized}


def _block(recipe: str, on: torch.device, mode: str | None) -> Found:
    """A Llama block in bfloat16."""
    torch.manual_seed(0)
    tokens, dim, ffn, heads = (512, 512, 1024, 4) if on.type == "cuda" else (32, 64, 128, 2)
    model = LlamaBlock(dim, ffn, heads, heads // 2).to(on, torch.bfloat16)
    x = torch.randn(1, tokens, dim, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    return _checked(recipe, model, x, dy, 21, mode, residual=(x, dy), **BLOCK_DB)


def _experts(recipe: str, on: torch.device) -> Found:
    """A linear per expert."""
    torch.manual_seed(0)
    model = Experts(4, 256, 128, 512, on)
    x = torch.randn(512, 256, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(512, 128, device=on, dtype=torch.bfloat16)
    return _checked(recipe, model, x, dy, 3, None, **_GEMM_DB)
