"""Estimated time of a training step on an H200 and an H100, bf16 against every recipe and torchao's, from the code generated.

TransformerEngine's layer of 12 GEMMs (`benchmarks.gemm_layer`) and the blocks of `benchmarks.train_step` at 16384 tokens,
sequences of 8192. The launches are those of Inductor's code (`benchmarks.cross_codegen`); each takes what
`benchmarks.h100_model` makes of its cubin; GEMMs and attention run at the rates below. Nothing is timed; the same model serves
all contestants. "Saved copies": weight_copies="save", which is what TransformerEngine does; by default a backward of so many
rows casts weights again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import h100_model
from benchmarks.common import main
from benchmarks.contestants import contestants
from benchmarks.cross_codegen import Event
from benchmarks.isolation import Bench, Row
from benchmarks.kernel_cost import block, generated_programs, loop_steps, program_of, step, where
from benchmarks.train_step import BLOCKS
from benchmarks.variants import Launch, compile_launch
from fp8pass.cost import H200, Device

#: Low and high speed of GEMMs over bf16, assumptions. High: TransformerEngine's published layer (`benchmarks.gemm_layer`),
#: 32.0 ms in bf16, 19.0 with delayed and 22.9 with blockwise scaling, less the 1.4 ms in which its casts would move 5 GB at
#: 85 % of a copy's speed. Low: 8 % less, for nobody has measured ours, and gradients' GEMMs do without fast accumulation.
#: "row": with a scale per row, torchao's and ours; less by what the cost model takes off.
_ROW = H200.row_wise_flops / H200.fp8_flops
SPEED_UP = {"bf16": (1.0, 1.0), "fp8": (1.70, 1.84), "row": (1.70 * _ROW, 1.84 * _ROW), "blockwise": (1.37, 1.49)}
#: FLOP/s of causal attention with heads of 128 and 8192 tokens, forward and backward, assumptions: about what the plots of
#: FlashAttention-3 (Shah et al., 2024) show for cuDNN on an H100, which torch 2.11 and newer choose on Hopper (`--part 0` of
#: `benchmarks.gpu` says what torch chooses, and measures it). FlashAttention-2's would be 380e12 and 310e12.
ATTENTION = {"forward": 600e12, "backward": 475e12}

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


def seconds_of(num_bytes: float, program: h100_model.Program, device: Device = H200) -> float:
    """Time of one launch whose programs together move so many bytes."""
    bandwidth = device.memory_bandwidth
    return h100_model.LAUNCH + num_bytes / (bandwidth * h100_model.share_of_copy(program, bandwidth))


def _launch_seconds(launch: Launch, num_bytes: float, load_share: float, device: Device) -> float:
    per_program = num_bytes / launch.programs
    steps = loop_steps(launch, per_program / 2)
    compiled = compile_launch(launch, 90)
    return seconds_of(num_bytes, program_of(compiled, steps, per_program * load_share, per_program * (1 - load_share)), device)


def event_seconds(event: Event, device: Device = H200) -> float:
    """Time of a launch that is no GEMM and no attention."""
    if event.generated is not None:
        return min(seconds_of(event.num_bytes, program, device) for program in generated_programs(event))
    if not event.launches:
        return h100_model.LAUNCH + event.num_bytes / device.memory_bandwidth
    given = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in event.shapes)
    # One launch reads the matrices; the others are scalars' work.
    large = max(event.launches, key=lambda launch: launch.programs)
    others = (len(event.launches) - 1) * h100_model.LAUNCH
    return others + _launch_seconds(large, event.num_bytes, min(1.0, given / max(event.num_bytes, 1)), device)


def _kind(event: Event) -> str:
    """The kind of a GEMM's rate: torch's, if it is given a scale for every row, is a rowwise one."""
    _, kind = _GEMMS[event.name]
    has_rows = any(dtype == torch.float32 and math.prod(shape) > 1 for dtype, shape in event.shapes[2:4])
    return "row" if event.name == "aten::_scaled_mm" and has_rows else kind


def estimate(events: list[Event], device: Device = H200) -> Estimate:
    """A step of these launches."""
    gemms, attention, kernels, num_kernels, num_bytes = [0.0, 0.0], 0.0, 0.0, 0, 0
    for event in events:
        if event.name in _GEMMS:
            first, _ = _GEMMS[event.name]
            (m, k), (_, n) = (shape for _, shape in event.shapes[first : first + 2])
            for i, speed_up in enumerate(SPEED_UP[_kind(event)]):
                gemms[i] += 2 * m * n * k / (device.bf16_flops * speed_up)
        elif "attention" in event.name and event.generated is None:
            batch, heads, tokens, width = next(shape for _, shape in event.shapes if len(shape) == 4)
            backward = "backward" in event.name
            flops = 2 * batch * heads * tokens * tokens * width * (2.5 if backward else 1.0)
            attention += flops / ATTENTION["backward" if backward else "forward"]
        else:
            kernels += event_seconds(event, device)
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
    blocks = {f"{name} block": functools.partial(_train_step_block, name) for name in ("8B", "8B-wide")}
    return {"12 GEMMs": lambda: _linears(15872, 1), **blocks}


def _train_step_block(name: str) -> list[tuple[nn.Module, torch.Tensor]]:
    dim, ffn, heads, kv_heads = BLOCKS[name]
    return block(dim, ffn, heads, 2, 8192, kv_heads)


def _contestants(quick: bool) -> dict[str, Callable[[nn.Module], Any]]:
    if quick:
        return contestants(("delayed",), with_peers=False)
    saving = contestants(_RECIPES, with_peers=False, weight_copies="save")
    return contestants(_RECIPES) | {f"{recipe}, saved copies": saving[recipe] for recipe in _RECIPES}


def _estimated(
    workload: str, name: str, models: Callable[[], list[tuple[nn.Module, torch.Tensor]]], compile_model: Any, bench: Bench
) -> dict[str, Estimate]:
    events = [event for model, x in models() for event in step(model, compile_model, x)]
    gemms = sum(event.name in _GEMMS for event in events)
    expected = 12 if workload == "12 GEMMs" else 21
    bench.require(gemms == expected, f"{workload}, {name}: {gemms} GEMMs")
    return {device: estimate(events, constants) for device, constants in h100_model.DEVICES.items()}


def _row(what: str, found: Estimate, base: Estimate | None) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "kernels": found.num_kernels, "GB": found.gigabytes}
    row |= {"kernels ms": found.kernels * 1e3, "attention ms": found.attention * 1e3}
    for high, label in ((False, "low"), (True, "high")):
        row[f"GEMMs ms, {label}"] = found.gemms[high] * 1e3
        if base is not None:
            row[f"speed-up, {label}"] = base.total(high) / found.total(high)
    if found.attention and base is not None:
        row["without attention, low"] = base.total(False, False) / found.total(False, False)
        row["without attention, high"] = base.total(True, False) / found.total(True, False)
    return row


def _rows(bench: Bench) -> Iterator[Row]:
    for workload, models in workloads(bench.quick).items():
        base: dict[str, Estimate] = {}
        for name, compile_model in _contestants(bench.quick).items():
            what = f"{workload} {name}"
            found = bench(what, _estimated, workload, name, models, compile_model, bench) or {}
            base = found if name == "bf16" else base
            for device, of_device in found.items():
                yield _row(what if device == "H200" else f"{what}, {device}", of_device, base.get(device))


def run(bench: Bench) -> Iterable[Row]:
    """`quick`: a tiny block, bf16 and delayed scaling alone."""
    bench.baseline, bench.where = "bf16 torch.compile", where()
    bench.notes.append("estimates from cubins and stated rates; nothing was timed")
    return _rows(bench)


if __name__ == "__main__":
    main("layer_cost", run)
