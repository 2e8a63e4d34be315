"""Every recipe end to end: a block through Inductor and with CUDA graphs, and a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.contestants import Replayed, steady
from benchmarks.correctness import require_fp8, require_step, run_step
from benchmarks.gemm_layer import Experts
from benchmarks.isolation import Bench
from benchmarks.models import LlamaBlock
from benchmarks.part0.cases import Case, Found, skip_if
from benchmarks.part0.operations import mx_obstacle
from fp8pass import fp8_compile, inspect
from fp8pass.recipes import PRESETS

#: By the names that users give.
NAMES = tuple(PRESETS)
#: dB: of a block of seven GEMMs, and of one GEMM; the gradients' operands in E5M2 (tests/tolerances.py).
_BLOCK_DB, _GEMM_DB = {"output_db": 18.0, "gradient_db": 12.0}, {"output_db": 25.0, "gradient_db": 18.0}
#: Steps: with CUDA graphs the first ones warm up and record.
_STEPS = 5


def cases(recipe: str, on: torch.device) -> Iterator[Case]:
    """The cases of one recipe."""
    yield Case("Inductor", functools.partial(_block, recipe, on, None))
    yield Case("CUDA graphs", functools.partial(_block, recipe, on, "reduce-overhead"))
    yield Case("experts", functools.partial(_experts, recipe, on))


def _checked(
    recipe: str, model: nn.Module, x: torch.Tensor, dy: torch.Tensor, num_gemms: int | None, mode: str | None, **bounds: Any
) -> Found:
    """Steps of the compiled model beside one in bfloat16. num_gemms: how many run in FP8, all of them; None: as many as the
    recipe takes."""
    skip_if(mx_obstacle(x.device) if recipe.startswith("mxfp8") else None)
    torch._dynamo.reset()
    expected = run_step(model, x, dy)
    compiled = fp8_compile(model, steady(recipe), mode=mode)
    call: Callable[[torch.Tensor], Any] = compiled if mode is None else Replayed(compiled)
    for _ in range(_STEPS - 1):
        run_step(call, x, dy)
    bench = Bench()
    require_step(recipe, expected, run_step(call, x, dy), bench, **bounds)
    gemms = inspect(compiled).gemms
    if num_gemms is not None:
        require_fp8(recipe, compiled, num_gemms, bench)
    elif not any(gemm.quantized for gemm in gemms):
        raise AssertionError(f"{recipe}: none of {len(gemms)} GEMMs in FP8")
    return {"GEMMs in FP8": sum(gemm.quantized for gemm in gemms), "checks": bench.checks}


def _num_gemms(recipe: str, num_gemms: int) -> int | None:
    """Recipes whose name says that grad_weight is in high precision leave a third of them."""
    return None if recipe.endswith("_hp") else num_gemms


def _block(recipe: str, on: torch.device, mode: str | None) -> Found:
    """A Llama block in bfloat16."""
    torch.manual_seed(0)
    tokens, dim, ffn, heads = (512, 512, 1024, 4) if on.type == "cuda" else (32, 64, 128, 2)
    model = LlamaBlock(dim, ffn, heads, heads // 2).to(on, torch.bfloat16)
    x = torch.randn(1, tokens, dim, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    return _checked(recipe, model, x, dy, _num_gemms(recipe, 21), mode, residual=(x, dy), **_BLOCK_DB)


def _experts(recipe: str, on: torch.device) -> Found:
    """A linear per expert."""
    torch.manual_seed(0)
    model = Experts(4, 256, 128, 512, on)
    x = torch.randn(512, 256, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(512, 128, device=on, dtype=torch.bfloat16)
    return _checked(recipe, model, x, dy, _num_gemms(recipe, 3), None, **_GEMM_DB)
