"""TransformerEngine's published layer: 4 linears, 12 GEMMs with quantization, per recipe against bf16, and pre-quantized.

Hidden 4096, ffn 16384, 15872 tokens: QKV 4096 -> 12288, out 4096 -> 4096, up 4096 -> 16384, down 16384 -> 4096. Their
speed-up over bf16 on an H200 NVL, of the sum of all GEMMs: delayed 1.69, current 1.58, blockwise 1.40; pre-quantized 1.90.
Below the speed-up: the experts' linears of Qwen3-30B-A3B as grouped GEMMs, 128 experts, every one with its share of the rows.
Columns: the device's time; with "queued", the time of calls that follow each other, the host's included; with "graph", the
device's with mode="reduce-overhead".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import Result, device, main, require
from benchmarks.gates import Step, parameters_of, require_fp8, require_step, run_step
from benchmarks.peers import contestants, replayed
from benchmarks.timing import in_turns
from fp8pass.rules import ROLES
from lowering.blockwise import cublaslt
from lowering.formats import E4M3, E5M2
from lowering.grouped import cutlass
from tests.support.numerics import sqnr

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


def _gate(model: Any, name: str, expected: Step, x: torch.Tensor, dy: torch.Tensor, checks: list[str]) -> None:
    for _ in range(2):  # delayed scaling has its scales after one step
        run_step(model, x, dy)
    require_step(name, expected, run_step(model, x, dy), checks, output_db=_OUTPUT_DB, gradient_db=_GRADIENT_DB)


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
    extra: dict[str, Callable[[], None]],
    checks: list[str],
    notes: list[str],
) -> dict[str, Any]:
    """One row: a layer with each recipe, and other steps beside it."""
    expected = run_step(model, x, dy)
    torch._dynamo.reset()
    steps: dict[str, Callable[[], Any]] = {}
    for label, compile_model in contestants(RECIPES, with_peers=False).items():
        compiled = compile_model(model)
        _gate(compiled, f"{what}, {label}", expected, x, dy, checks)
        if label != "bf16":
            require_fp8(f"{what}, {label}", compiled, 3, checks)
        steps[label] = _step(compiled, x, dy)
    steps |= extra
    row: dict[str, Any] = {"what": what}
    times = in_turns(steps, x.device)
    row |= {f"{label} ms": timing.ms for label, timing in times.items()}
    row |= {f"{label} queued ms": timing.back_to_back_ms for label, timing in times.items()}
    if x.is_cuda:
        found = replayed(
            model, RECIPES, lambda c, n: _gate(c, f"{what}, {n}, CUDA graph", expected, x, dy, checks), notes, False
        )
        graphs = in_turns({label: _step(c, x, dy) for label, c in found.items()}, x.device)
        row |= {f"{label} graph ms": timing.ms for label, timing in graphs.items()}
    return row


def _operands(rows: int, inputs: int, outputs: int, on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of a layer and the gradient of its output."""
    x = torch.randn(rows, inputs, device=on, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(rows, outputs, device=on, dtype=torch.bfloat16)


def _linear(
    name: str, inputs: int, outputs: int, tokens: int, on: torch.device, checks: list[str], notes: list[str]
) -> dict[str, Any]:
    """The row of a linear."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs, bias=False, device=on, dtype=torch.bfloat16)
    x, dy = _operands(tokens, inputs, outputs, on)
    extra = {"pre-quantized": _prequantized(name, x, model.weight, dy, checks)}
    return _compared(f"{name} {inputs}->{outputs}", model, x, dy, extra, checks, notes)


def _grouped(
    name: str, inputs: int, outputs: int, quick: bool, on: torch.device, checks: list[str], notes: list[str]
) -> dict[str, Any]:
    """The row of the experts' linears."""
    experts, rows = (4, 256) if quick else (EXPERTS, EXPERT_ROWS)
    torch.manual_seed(0)
    model = Experts(experts, inputs, outputs, rows, on)
    x, dy = _operands(rows, inputs, outputs, on)
    return _compared(f"{name} {experts} x {inputs}->{outputs}", model, x, dy, {}, checks, notes)


def _rows(quick: bool, on: torch.device, checks: list[str], notes: list[str]) -> Iterator[dict[str, Any]]:
    tokens, shrink = (64, 64) if quick else (_TOKENS, 1)
    found = []
    for name, (inputs, outputs) in LINEARS.items():
        found.append(_linear(name, inputs // shrink, outputs // shrink, tokens, on, checks, notes))
        yield found[-1]
    keys = [key for key in found[0] if key != "what" and all(key in row for row in found)]
    total = {key: sum(row[key] for row in found) for key in keys}
    yield {"what": "sum", **total}
    base = {kind: total.get(f"bf16{kind} ms") for kind in ("", " queued", " graph")}
    kinds = {key: next(k for k in (" queued", " graph", "") if key.endswith(f"{k} ms")) for key in keys}
    yield {"what": "speed-up", **{key: base[kinds[key]] / total[key] for key in keys if base[kinds[key]]}}
    for name, (inputs, outputs) in GROUPED.items():
        yield _grouped(name, inputs // (8 if quick else 1), outputs // (8 if quick else 1), quick, on, checks, notes)
    notes += [f"grouped {kind}: {'CUTLASS' if right else 'Triton'}" for kind, right in cutlass.trials().items()]
    notes += [f"blockwise {kind}: {'cuBLASLt' if right else 'Triton'}" for kind, right in cublaslt.trials().items()]


def run(quick: bool) -> Result:
    on = device(quick)
    checks: list[str] = []
    notes = ["forward, grad_input and grad_weight, quantization included"]
    return Result(_rows(quick, on, checks, notes), "bf16 torch.compile", checks, notes)


if __name__ == "__main__":
    main("gemm_layer", run)
