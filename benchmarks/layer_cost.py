"""Estimated time of a training step on an H200, bf16 against every recipe and torchao's, from the code generated for it.

TransformerEngine's layer of 12 GEMMs (`benchmarks.gemm_layer`) and the block of an 8B Llama at 16384 tokens, sequences of
8192. The launches are those of Inductor's code (tests/support/replay.py); each takes what `benchmarks.hopper` makes of
its cubin; GEMMs and attention run at the rates below. Nothing is timed; the same model serves all contestants. "Saved copies":
weight_copies="save", which is what TransformerEngine does; by default a backward of so many rows casts weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import hopper
from benchmarks.common import Result, main, require
from benchmarks.kernel_cost import block, generated_programs, loop_steps, program_of, step, where
from benchmarks.peers import contestants
from lowering.triton.variants import Launch, compile_launch
from tests.support.replay import Event

#: FLOP/s of a large bf16 GEMM on an H200 SXM under its power limit, an assumption: 80 % of the data sheet's 989e12.
BF16 = 790e12
#: Low and high speed of GEMMs over bf16, assumptions. High: TransformerEngine's published layer (`benchmarks.gemm_layer`),
#: 32.0 ms in bf16, 19.0 with delayed and 22.9 with blockwise scaling, less the 1.4 ms in which its casts would move 5 GB at
#: 85 % of a copy's speed. Low: 8 % less, for nobody has measured ours, and gradients' GEMMs do without fast accumulation.
#: "fp8" has one scale per tensor or per row: what the latter costs a GEMM is not counted, torchao's or ours.
SPEED_UP = {"bf16": (1.0, 1.0), "fp8": (1.70, 1.84), "blockwise": (1.37, 1.49)}
#: FLOP/s of causal flash attention with heads of 128 and 8192 tokens, forward and backward, assumptions: about what the
#: plots of FlashAttention-3 (Shah et al., 2024) show for FlashAttention-2 on an H100, which torch runs.
ATTENTION = {"forward": 380e12, "backward": 310e12}

_RECIPES = ("delayed", "current", "blockwise", "rowwise")
_GEMMS = {"aten::mm": (0, "bf16"), "aten::addmm": (1, "bf16"), "aten::_scaled_mm": (0, "fp8"),
          "lowering::scaled_mm": (0, "fp8"), "lowering::scaled_mm_blockwise": (0, "blockwise")}  # fmt: skip


class Estimate(NamedTuple):
    """Seconds of a step."""

    gemms: tuple[float, float]
    """With the low and the high rates."""
    attention: float
    kernels: float
    """Everything else."""
    num_kernels: int
    gigabytes: float
    """Moved by those."""

    def total(self, high: bool, with_attention: bool = True) -> float:
        return self.gemms[high] + self.kernels + self.attention * with_attention


def seconds_of(num_bytes: float, program: hopper.Program) -> float:
    """Of one launch whose programs together move so many bytes."""
    return hopper.LAUNCH + num_bytes / (hopper.COPY_BANDWIDTH * hopper.share_of_copy(program))


def _launch_seconds(launch: Launch, num_bytes: float, load_share: float) -> float:
    per_program = num_bytes / launch.programs
    steps = loop_steps(launch, per_program / 2)
    compiled = compile_launch(launch, 90)
    return seconds_of(num_bytes, program_of(compiled, steps, per_program * load_share, per_program * (1 - load_share)))


def event_seconds(event: Event) -> float:
    """Of a launch that is no GEMM and no attention."""
    if event.generated is not None:
        return min(seconds_of(event.num_bytes, program) for program in generated_programs(event))
    if not event.launches:
        return hopper.LAUNCH + event.num_bytes / hopper.COPY_BANDWIDTH
    given = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in event.shapes)
    # One launch reads the matrices; the others are scalars' work.
    large = max(event.launches, key=lambda launch: launch.programs)
    others = (len(event.launches) - 1) * hopper.LAUNCH
    return others + _launch_seconds(large, event.num_bytes, min(1.0, given / max(event.num_bytes, 1)))


def estimate(events: list[Event]) -> Estimate:
    """A step of these launches."""
    gemms, attention, kernels, num_kernels, num_bytes = [0.0, 0.0], 0.0, 0.0, 0, 0
    for event in events:
        if event.name in _GEMMS:
            first, kind = _GEMMS[event.name]
            (m, k), (_, n) = (shape for _, shape in event.shapes[first : first + 2])
            for i, speed_up in enumerate(SPEED_UP[kind]):
                gemms[i] += 2 * m * n * k / (BF16 * speed_up)
        elif "attention" in event.name and event.generated is None:
            batch, heads, tokens, width = next(shape for _, shape in event.shapes if len(shape) == 4)
            backward = "backward" in event.name
            flops = 2 * batch * heads * tokens * tokens * width * (2.5 if backward else 1.0)
            attention += flops / ATTENTION["backward" if backward else "forward"]
        else:
            kernels += event_seconds(event)
            num_kernels += max(1, len(event.launches))
            num_bytes += event.num_bytes
    return Estimate((gemms[0], gemms[1]), attention, kernels, num_kernels, num_bytes / 1e9)


def _linears(tokens: int, shrink: int) -> list[tuple[nn.Module, torch.Tensor]]:
    from benchmarks.gemm_layer import LINEARS

    found = []
    for inputs, outputs in LINEARS.values():
        linear = nn.Linear(inputs // shrink, outputs // shrink, bias=False, dtype=torch.bfloat16)
        found.append((linear, torch.empty(tokens, inputs // shrink, dtype=torch.bfloat16, requires_grad=True)))
    return found


def workloads(quick: bool) -> dict[str, Callable[[], list[tuple[nn.Module, torch.Tensor]]]]:
    """Name -> models, each with its input."""
    if quick:
        return {"tiny block": lambda: block(256, 512, 4, 1, 256)}
    return {"12 GEMMs": lambda: _linears(15872, 1), "8B block": lambda: block(4096, 14336, 32, 2, 8192)}


def _contestants(quick: bool) -> dict[str, Callable[[nn.Module], Any]]:
    if quick:
        return contestants(("delayed",), with_peers=False)
    saving = contestants(_RECIPES, with_peers=False, weight_copies="save")
    return contestants(_RECIPES) | {f"{recipe}, saved copies": saving[recipe] for recipe in _RECIPES}


def _rows(quick: bool, checks: list[str]) -> Iterator[dict[str, Any]]:
    for workload, models in workloads(quick).items():
        base = None
        for name, compile_model in _contestants(quick).items():
            events = [event for model, x in models() for event in step(model, compile_model, x)]
            gemms = sum(event.name in _GEMMS for event in events)
            expected = 12 if workload == "12 GEMMs" else 21
            require(gemms == expected, f"{workload}, {name}: {gemms} GEMMs", checks)
            found = estimate(events)
            base = base or found
            row: dict[str, Any] = {"what": f"{workload} {name}", "kernels": found.num_kernels, "GB": found.gigabytes}
            row |= {"kernels ms": found.kernels * 1e3, "attention ms": found.attention * 1e3}
            for high, label in ((False, "low"), (True, "high")):
                row[f"GEMMs ms, {label}"] = found.gemms[high] * 1e3
                row[f"speed-up, {label}"] = base.total(high) / found.total(high)
            if found.attention:
                row["without attention, low"] = base.total(False, False) / found.total(False, False)
                row["without attention, high"] = base.total(True, False) / found.total(True, False)
            yield row


def run(quick: bool) -> Result:
    """`quick`: a tiny block, bf16 and delayed scaling alone."""
    checks: list[str] = []
    notes = ["estimates from cubins and stated rates; nothing was timed"]
    return Result(_rows(quick, checks), "bf16 torch.compile", checks, notes, where())


if __name__ == "__main__":
    main("layer_cost", run)
