"""TransformerEngine's published layer: 4 linears, 12 GEMMs with quantization, per recipe against bf16, and pre-quantized.

Hidden 4096, ffn 16384, 15872 tokens: QKV 4096 -> 12288, out 4096 -> 4096, up 4096 -> 16384, down 16384 -> 4096. Their
speed-up over bf16 on an H200 NVL, of the sum of all GEMMs: delayed 1.69, current 1.58, blockwise 1.40; pre-quantized 1.90.
Below the speed-up: the experts' linears of Qwen3-30B-A3B as grouped GEMMs, 128 experts, every one with its share of the rows.
Columns: the device's time; "back-to-back", of calls that follow each other, the host's time included; "graph": with
mode="reduce-overhead", compiled and timed after all plain ones. A contestant that fails has a row of its own, and no column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.common import Result, device, main, require
from benchmarks.contestants import Replayed, contestants
from benchmarks.correctness import Step, parameters_of, require_fp8, require_step, run_step, sqnr
from benchmarks.isolation import Attempts
from benchmarks.timing import columns, in_turns
from fp8pass.rules import ROLES
from lowering.blockwise import gemm
from lowering.formats import E4M3, E5M2
from lowering.grouped import gemm as grouped_gemm
from lowering.trials import libraries_of

#: Experts, rows of all, and [inputs, outputs] of each expert's linears.
EXPERTS, EXPERT_ROWS = 128, 131072
GROUPED = {"experts' gate and up": (2048, 1536), "experts' down": (768, 2048)}
LINEARS = {"qkv": (4096, 12288), "out": (4096, 4096), "up": (4096, 16384), "down": (16384, 4096)}
_TOKENS = 15872
RECIPES = ("current", "delayed", "blockwise", "rowwise")
#: dB. One GEMM of E4M3 operands; one with an operand in E5M2 (tests/tolerances.py).
_OUTPUT_DB, _GRADIENT_DB = 25.0, 20.0
#: dB. A product of FP8 operands, accumulated with 14 bits at least, in bfloat16.
_PRODUCT_DB = 34.0


def _step(model: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    leaves = [x, *parameters_of(model).values()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        model(x).backward(dy)

    return step


def _prequantized(
    what: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, checks: list[str]
) -> Callable[[], list[torch.Tensor]]:
    """The three GEMMs of a linear on FP8 data that is there already: the practical ceiling."""
    one = torch.ones((), device=x.device)
    x8, w8, dy8 = x.detach().to(E4M3), w.detach().to(E4M3), dy.to(E5M2)
    xt, wt, dyt = (t.t().contiguous() for t in (x8, w8, dy8))
    scaled_mm = torch.ops.lowering.scaled_mm

    def step() -> list[torch.Tensor]:
        return [
            scaled_mm(x8, w8.t(), one, one, fast_accum=True),
            scaled_mm(dy8, wt.t(), one, one),
            scaled_mm(dyt, xt.t(), one, one),
        ]

    exact = [x8.float() @ w8.float().t(), dy8.float() @ w8.float(), dy8.float().t() @ x8.float()]
    for role, expected, found in zip(ROLES, exact, step(), strict=True):
        error = sqnr(expected, found)
        require(error >= _PRODUCT_DB, f"{what}, pre-quantized, {role}: SQNR {error:.1f} dB >= {_PRODUCT_DB:g}", checks)
    return step


def _ready(compiled: Any, what: str, recipe: str, expected: Step, x: torch.Tensor, dy: torch.Tensor, checks: list[str]) -> Any:
    """Compile, and pass the gates."""
    for _ in range(2):  # delayed scaling has its scales after one step
        run_step(compiled, x, dy)
    require_step(what, expected, run_step(compiled, x, dy), checks, output_db=_OUTPUT_DB, gradient_db=_GRADIENT_DB)
    if recipe in RECIPES:
        require_fp8(what, compiled.compiled if isinstance(compiled, Replayed) else compiled, 3, checks)
    return compiled


class Experts(nn.Module):
    """A linear per expert, as transformers' mixtures compute it: one grouped GEMM. Groups differ by up to a third."""

    offs: torch.Tensor

    def __init__(self, experts: int, inputs: int, outputs: int, rows: int, on: torch.device):
        super().__init__()
        weight = torch.randn(experts, outputs, inputs, device=on, dtype=torch.bfloat16) * inputs**-0.5
        self.weight = nn.Parameter(weight)
        shares = torch.linspace(0.75, 1.25, experts).cumsum(0)
        self.register_buffer("offs", (shares / shares[-1] * rows).to(torch.int32).to(on))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=self.offs)


def _compared(
    what: str,
    model: nn.Module,
    x: torch.Tensor,
    dy: torch.Tensor,
    extra: Mapping[str, Callable[[], Callable[[], Any]]],
    checks: list[str],
    attempts: Attempts,
) -> Iterator[dict[str, Any]]:
    """One row: a layer with each recipe, and other steps beside it, which `extra` makes. It comes twice: without and with the
    columns of CUDA graphs."""
    expected = attempts(f"{what}, eager, in bfloat16", lambda: run_step(model, x, dy))
    if expected is None:
        return
    torch._dynamo.reset()
    row: dict[str, Any] = {"what": what}
    for mode, suffix in ((None, ""), ("reduce-overhead", " graph")):
        steps: dict[str, Callable[[], Any]] = {}
        for name, compile_model in contestants(RECIPES, with_peers=False, mode=mode).items():

            def prepare(
                name: str = name,
                compile_model: Callable[[nn.Module], Any] = compile_model,
                mode: str | None = mode,
                suffix: str = suffix,
            ) -> Any:
                compiled = compile_model(model)
                compiled = compiled if mode is None else Replayed(compiled)
                return _step(_ready(compiled, f"{what}, {name}{suffix}", name, expected, x, dy, checks), x, dy)

            step = attempts(f"{what}, {name}{suffix}", prepare)
            if step is not None:
                steps[f"{name}{suffix}"] = step
        for name, make in extra.items() if mode is None else ():
            step = attempts(f"{what}, {name}", make)
            if step is not None:
                steps[name] = step
        for label, timing in in_turns(steps, x.device, attempts, lambda label: f"{what}, {label}").items():
            row |= columns(label, timing)
        yield row


def _operands(rows: int, inputs: int, outputs: int, on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of a layer and the gradient of its output."""
    x = torch.randn(rows, inputs, device=on, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(rows, outputs, device=on, dtype=torch.bfloat16)


def _linear(
    name: str, inputs: int, outputs: int, tokens: int, on: torch.device, checks: list[str], attempts: Attempts
) -> Iterator[dict[str, Any]]:
    """The row of a linear."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs, bias=False, device=on, dtype=torch.bfloat16)
    x, dy = _operands(tokens, inputs, outputs, on)
    extra = {"pre-quantized": lambda: _prequantized(name, x, model.weight, dy, checks)}
    return _compared(f"{name} {inputs}->{outputs}", model, x, dy, extra, checks, attempts)


def _grouped(
    name: str, inputs: int, outputs: int, quick: bool, on: torch.device, checks: list[str], attempts: Attempts
) -> Iterator[dict[str, Any]]:
    """The row of the experts' linears."""
    experts, rows = (4, 256) if quick else (EXPERTS, EXPERT_ROWS)
    torch.manual_seed(0)
    model = Experts(experts, inputs, outputs, rows, on)
    x, dy = _operands(rows, inputs, outputs, on)
    return _compared(f"{name} {experts} x {inputs}->{outputs}", model, x, dy, {}, checks, attempts)


def _totals(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The sum of the linears' times, and what it is to bf16's, of every contestant that ran them all."""
    keys = [key for key in found[0] if key.endswith(" ms") and all(key in row for row in found)]
    total = {key: sum(row[key] for row in found) for key in keys}
    yield {"what": "sum", **total}
    kinds = (" graph back-to-back ms", " graph ms", " back-to-back ms", " ms")
    of_key = {key: next(kind for kind in kinds if key.endswith(kind)) for key in keys}
    base = {kind: total.get(f"bf16{kind}") for kind in kinds}
    yield {"what": "speed-up", **{key: base[of_key[key]] / total[key] for key in keys if base[of_key[key]] is not None}}


def _rows(quick: bool, on: torch.device, checks: list[str], attempts: Attempts, notes: list[str]) -> Iterator[dict[str, Any]]:
    tokens, shrink = (64, 64) if quick else (_TOKENS, 1)
    found: dict[str, dict[str, Any]] = {}
    for name, (inputs, outputs) in LINEARS.items():
        for row in _linear(name, inputs // shrink, outputs // shrink, tokens, on, checks, attempts):
            found[name] = row
            yield row
    if found.keys() == LINEARS.keys():
        yield from _totals(list(found.values()))
    for name, (inputs, outputs) in GROUPED.items():
        shrink = 8 if quick else 1
        yield from _grouped(name, inputs // shrink, outputs // shrink, quick, on, checks, attempts)
    notes += [f"grouped {kind}: {library}" for kind, library in libraries_of(grouped_gemm.LIBRARIES).items()]
    notes += [f"blockwise {kind}: {library}" for kind, library in libraries_of(gemm.LIBRARIES).items()]


def run(quick: bool) -> Result:
    on = device(quick)
    checks: list[str] = []
    attempts = Attempts()
    notes = ["forward, grad_input and grad_weight, quantization included"]
    return Result(_rows(quick, on, checks, attempts, notes), "bf16 torch.compile", checks, attempts, notes)


if __name__ == "__main__":
    main("gemm_layer", run)
