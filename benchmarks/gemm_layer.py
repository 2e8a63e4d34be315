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

from benchmarks.common import device, main
from benchmarks.contestants import contestants
from benchmarks.correctness import ready, run_step, sqnr, step_of
from benchmarks.isolation import Bench, Row
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
TOKENS = 15872
RECIPES = ("current", "delayed", "blockwise", "rowwise")
#: dB. One GEMM of E4M3 operands; one with an operand in E5M2 (tests/tolerances.py).
_OUTPUT_DB, _GRADIENT_DB = 25.0, 20.0
#: dB. A product of FP8 operands, accumulated with 14 bits at least, in bfloat16.
_PRODUCT_DB = 34.0


def _prequantized(
    what: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, bench: Bench
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
        bench.require(error >= _PRODUCT_DB, f"{what}, pre-quantized, {role}: SQNR {error:.1f} dB >= {_PRODUCT_DB:g}")
    return step


def ends_of_groups(experts: int, rows: int) -> torch.Tensor:
    """The ends of groups of rows that differ by up to a third."""
    shares = torch.linspace(0.75, 1.25, experts).cumsum(0)
    return (shares / shares[-1] * rows).to(torch.int32)


class Experts(nn.Module):
    """A linear per expert, as transformers' mixtures compute it: one grouped GEMM. Groups differ by up to a third."""

    offs: torch.Tensor

    def __init__(self, experts: int, inputs: int, outputs: int, rows: int, on: torch.device):
        super().__init__()
        weight = torch.randn(experts, outputs, inputs, device=on, dtype=torch.bfloat16) * inputs**-0.5
        self.weight = nn.Parameter(weight)
        self.register_buffer("offs", ends_of_groups(experts, rows).to(on))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=self.offs)


def _compared(
    what: str,
    model: nn.Module,
    x: torch.Tensor,
    dy: torch.Tensor,
    extra: Mapping[str, Callable[[], Callable[[], Any]]],
    bench: Bench,
) -> Iterator[Row]:
    """One row: a layer with each recipe, and other steps beside it, which `extra` makes. It comes twice: without and with the
    columns of CUDA graphs."""
    expected = bench(f"{what}, eager, in bfloat16", run_step, model, x, dy)
    if expected is None:
        return
    torch._dynamo.reset()
    row: Row = {"what": what}
    for mode, suffix in ((None, ""), ("reduce-overhead", " graph")):

        def label(name: str, suffix: str = suffix) -> str:
            return f"{what}, {name}{suffix}"

        found = contestants(RECIPES, with_peers=False, mode=mode)
        bounds = {"output_db": _OUTPUT_DB, "gradient_db": _GRADIENT_DB}
        made = ready(found, model, label, expected, x, dy, bench, num_gemms=3, replayed=mode is not None, **bounds)
        steps: dict[str, Callable[[], Any]] = {f"{name}{suffix}": step_of(compiled, x, dy) for name, compiled in made.items()}
        for name, make in extra.items() if mode is None else ():
            step = bench(f"{what}, {name}", make)
            if step is not None:
                steps[name] = step
        for name, timing in in_turns(steps, x.device, bench, lambda name: f"{what}, {name}").items():
            row |= columns(name, timing)
        yield row


def _operands(rows: int, inputs: int, outputs: int, on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of a layer and the gradient of its output."""
    x = torch.randn(rows, inputs, device=on, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(rows, outputs, device=on, dtype=torch.bfloat16)


def _linear(name: str, inputs: int, outputs: int, tokens: int, on: torch.device, bench: Bench) -> Iterator[Row]:
    """The row of a linear."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs, bias=False, device=on, dtype=torch.bfloat16)
    x, dy = _operands(tokens, inputs, outputs, on)
    extra = {"pre-quantized": lambda: _prequantized(name, x, model.weight, dy, bench)}
    return _compared(f"{name} {inputs}->{outputs}", model, x, dy, extra, bench)


def _grouped(name: str, inputs: int, outputs: int, on: torch.device, bench: Bench) -> Iterator[Row]:
    """The row of the experts' linears."""
    experts, rows = (4, 256) if bench.quick else (EXPERTS, EXPERT_ROWS)
    torch.manual_seed(0)
    model = Experts(experts, inputs, outputs, rows, on)
    x, dy = _operands(rows, inputs, outputs, on)
    return _compared(f"{name} {experts} x {inputs}->{outputs}", model, x, dy, {}, bench)


def _totals(found: list[dict[str, Any]]) -> Iterator[Row]:
    """The sum of the linears' times, and what it is to bf16's, of every contestant that ran them all."""
    keys = [key for key in found[0] if key.endswith(" ms") and all(key in row for row in found)]
    total = {key: sum(row[key] for row in found) for key in keys}
    yield {"what": "sum", **total}
    kinds = (" graph back-to-back ms", " graph ms", " back-to-back ms", " ms")
    of_key = {key: next(kind for kind in kinds if key.endswith(kind)) for key in keys}
    base = {kind: total.get(f"bf16{kind}") for kind in kinds}
    yield {"what": "speed-up", **{key: base[of_key[key]] / total[key] for key in keys if base[of_key[key]] is not None}}


def run(bench: Bench) -> Iterator[Row]:
    on = device(bench.quick)
    bench.baseline = "bf16 torch.compile"
    bench.notes.append("forward, grad_input and grad_weight, quantization included")
    tokens, shrink = (64, 64) if bench.quick else (TOKENS, 1)
    found: dict[str, Row] = {}
    for name, (inputs, outputs) in LINEARS.items():
        for row in _linear(name, inputs // shrink, outputs // shrink, tokens, on, bench):
            found[name] = row
            yield row
    if found.keys() == LINEARS.keys():
        yield from _totals(list(found.values()))
    for name, (inputs, outputs) in GROUPED.items():
        shrink = 8 if bench.quick else 1
        yield from _grouped(name, inputs // shrink, outputs // shrink, on, bench)
    for title, libraries in (("grouped", grouped_gemm.LIBRARIES), ("blockwise", gemm.LIBRARIES)):
        bench.notes += [f"{title} {kind}: {library}" for kind, library in libraries_of(libraries).items()]


if __name__ == "__main__":
    main("gemm_layer", run)
