"""Models whose H200 code is executed on the CPU, kernel by kernel, and compared with the same rewrite run eagerly.

A check raises, or returns None.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.contestants import steady
from fp8pass import fp8_compile, state
from tests.emulation.casts import emulated_h200
from tests.support.models import LlamaBlock
from tests.tolerances import EMULATED_AMAX, SQNR_EMULATED, sqnr


@dataclasses.dataclass(frozen=True)
class Case:
    model: Callable[[int], nn.Module]
    """Makes one of the width of the input."""
    recipe: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    weight_copies: str = "save"
    options: dict[str, Any] | None = None
    """Inductor's."""
    generates: str = ""
    """Text that the generated code must contain, for the case to be one."""


def _llama(width: int) -> nn.Module:
    return LlamaBlock(width, min(2 * width, 128), 2)


class Ragged(nn.Module):
    """No size is a multiple of 16: every operand is padded. Biases, LayerNorm, GELU, a mask, a residual."""

    def __init__(self, width: int = 50) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 101), nn.Linear(101, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(h.masked_fill(h > 1.5, 0.0))


class Tiles(nn.Module):
    """Matrices of several tiles in both directions, and a product of two activations."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 320), nn.Linear(320, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(nn.functional.silu(self.up(x)))
        return h @ (h.transpose(-1, -2) @ x).tanh()


_CASES = {f"llama-{recipe}": Case(_llama, recipe, (1, 64, 64)) for recipe in ("delayed", "current", "blockwise", "rowwise")}
_CASES |= {f"ragged-{recipe}": Case(Ragged, recipe, (33, 50)) for recipe in ("delayed", "rowwise")}
_CASES |= {f"tiles-{recipe}": Case(Tiles, recipe, (80, 192)) for recipe in ("delayed", "blockwise")}
_MIXED = {"triton.mix_order_reduction_non_strict_mode": True}
_CASES |= {
    "llama-bf16": Case(_llama, "delayed", (1, 64, 64), torch.bfloat16),
    # What Inductor does by itself from 4096 rows on: one kernel reduces the rows and the columns of a norm's backward.
    "llama-mixed": Case(_llama, "delayed", (1, 128, 64), options=_MIXED, generates="RSPLIT_SIZE"),
    # Whole blocks, whose casts join the code before them.
    "llama-blocks": Case(_llama, "blockwise", (1, 128, 128), torch.bfloat16, generates="R0_BLOCK: tl.constexpr = 128"),
    "llama-rowwise-recompute": Case(
        _llama, "rowwise", (1, 32, 32), weight_copies="recompute", generates="lowering.cast_lines_rowwise"
    ),
    "llama-mxfp8": Case(_llama, "mxfp8", (1, 64, 64), weight_copies="recompute"),
    "llama-rowwise-hp": Case(_llama, "rowwise_with_gw_hp", (1, 32, 32), torch.bfloat16),
}
NAMES = tuple(_CASES)


def _train(
    case: Case, backend: str, device: str, steps: int = 2, mode: str | None = None
) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Output and gradients of the last step, whose scales come from the amaxes of those before, where a recipe has such."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = case.model(case.shape[-1]).to(device, case.dtype)
    options = case.options if backend == "inductor" else None
    copies = case.weight_copies
    compiled = fp8_compile(model, steady(case.recipe), backend=backend, weight_copies=copies, mode=mode, options=options)
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(case.shape, dtype=case.dtype).to(device).requires_grad_()
        out = compiled(x)
        (out * torch.linspace(-1, 1, out.shape[-1], dtype=case.dtype, device=device)).sum().backward()
    return {"output": out, "input": x.grad, **{n: p.grad for n, p in model.named_parameters()}}, compiled


def check_emulated(name: str, folder: pathlib.Path) -> None:
    """Raises unless the H200's code, executed in the interpreter, agrees with eager execution."""
    case = _CASES[name]
    steps = 2 if case.recipe == "delayed" else 1  # other recipes remember nothing
    with emulated_h200(folder) as emulation:
        compiled = _train(case, "inductor", "cpu", steps)
    assert len(emulation.graphs) == 2, [name for name, *_ in emulation.graphs]
    assert len(emulation.kernels) >= 4, emulation.kernels
    assert any(case.generates in code for code in emulation.code)
    _compare(case, compiled, _train(case, "aot_eager", "cpu", steps))


def check_on_gpu(name: str) -> None:
    """Run on a GPU."""
    _compare(_CASES[name], _train(_CASES[name], "inductor", "cuda"), _train(_CASES[name], "aot_eager", "cuda"))


def check_cuda_graphs(name: str) -> None:
    """Steps that warm up, record and replay CUDA graphs."""
    recorded = _train(_CASES[name], "inductor", "cuda", steps=5, mode="reduce-overhead")
    _compare(_CASES[name], recorded, _train(_CASES[name], "aot_eager", "cuda", steps=5))


def _compare(case: Case, compiled: tuple, eager: tuple) -> None:
    (results, compiled_model), (expected, eager_model) = compiled, eager
    bound = SQNR_EMULATED[case.dtype]
    measured = {name: sqnr(expected[name], value) for name, value in results.items()}
    assert all(value > bound for value in measured.values()), measured
    if case.recipe == "delayed" and case.dtype == torch.float32:
        found_state, expected_state = state(compiled_model), state(eager_model)
        for name in expected_state.tensors:
            for read in ("amax_history", "scale"):
                found, wanted = getattr(found_state, read)(name), getattr(expected_state, read)(name)
                torch.testing.assert_close(found, wanted, rtol=EMULATED_AMAX, atol=0)


CHECKS = {name: functools.partial(check_emulated, name) for name in NAMES}
