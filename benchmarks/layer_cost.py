"""Estimated time of a training step on an H200, bf16 against every recipe and torchao's, from the code generated for it.

TransformerEngine's layer of 12 GEMMs (`benchmarks.gemm_layer`) and the block of an 8B Llama at 16384 tokens, sequences of
8192. The launches are those of Inductor's code (tests/support/replay.py); each takes what `benchmarks.hopper` makes of
its cubin; GEMMs and attention run at the rates below. Nothing is timed; the same model serves all contestants.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import hopper
from benchmarks.common import Result, main, require
from benchmarks.kernel_cost import where
from benchmarks.peers import contestants
from tests.support.cross_codegen import capture
from tests.support.cubin import Launch, compile_launch, read_cubin
from tests.support.models import LlamaBlock
from tests.support.ptx import compile_config
from tests.support.replay import Event, replay

#: FLOP/s of a large bf16 GEMM on an H200 SXM under its power limit, an assumption: 80 % of the data sheet's 989e12.
BF16 = 790e12
#: Low and high speed of GEMMs over bf16. High: TransformerEngine's layer on an H200 NVL (its README's table: 32.0 ms in bf16, 19.0 with
#: delayed and 22.9 with blockwise scaling) less 1.4 ms in which its casts would move 5 GB at 85 % of a copy's speed; 8 %
#: less as low, for nobody has measured ours, and gradients' GEMMs do without fast accumulation.
SPEED_UP = {"bf16": (1.0, 1.0), "fp8": (1.70, 1.84), "blockwise": (1.37, 1.49)}
#: FLOP/s of causal flash attention with heads of 128, forward and backward. FlashAttention-3 (Shah et al., 2024), figures
#: 5 and 6: FlashAttention-2 on an H100, which is what scaled_dot_product_attention runs, at 8k.
ATTENTION = {"forward": 380e12, "backward": 310e12}

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


@functools.cache
def _read(cubin: bytes, loop_steps: int) -> Any:
    return read_cubin(cubin, loop_steps)


def _program(compiled: Any, loop_steps: int, load_bytes: float, store_bytes: float) -> hopper.Program:
    cubin, metadata = _read(compiled.asm["cubin"], loop_steps), compiled.metadata
    return hopper.Program(cubin.registers, metadata.shared, metadata.num_warps, cubin.executed, load_bytes, store_bytes)


def seconds_of(num_bytes: float, program: hopper.Program) -> float:
    """Of one launch whose programs together move so many bytes."""
    return hopper.LAUNCH + num_bytes / (hopper.COPY_BANDWIDTH * hopper.share_of_copy(program))


def generated_programs(event: Event) -> list[hopper.Program]:
    """A program of Inductor's kernel in each of its configurations."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kernel, found = event.generated, []
    sizes = {kind: 0 for kind in ("in", "out")}
    for name, value in event.arguments.items():
        if isinstance(value, torch.Tensor):
            sizes["in" if name.startswith("in") else "out"] += value.numel() * value.element_size()
    moved = sum(sizes.values()) or 1
    for config in kernel.configs:
        grid: Any = GridExpr.from_meta(kernel.inductor_meta, config).eval_slow({**event.arguments, **config.kwargs})
        programs = grid[0] * grid[1] * grid[2]
        steps = 1
        if "R0_BLOCK" in config.kwargs:
            steps = -(-event.arguments["r0_numel"] // config.kwargs["R0_BLOCK"])
        elif "RSPLIT_SIZE" in config.kwargs:
            steps = config.kwargs["RSPLIT_SIZE"] // config.kwargs["XBLOCK"]
        share = event.num_bytes / moved / programs
        found.append(_program(compile_config(kernel, config), steps, sizes["in"] * share, sizes["out"] * share))
    return found


def _launch_seconds(launch: Launch, num_bytes: float, load_share: float) -> float:
    per_program = num_bytes / launch.programs
    steps = 1
    if launch.kernel.__name__ == "multi_amax_kernel":
        steps = max(1, round(per_program / 2 / launch.arguments["BLOCK"]))
    compiled = compile_launch(launch, 90)
    return seconds_of(num_bytes, _program(compiled, steps, per_program * load_share, per_program * (1 - load_share)))


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
            batch, heads, tokens, width = max((shape for _, shape in event.shapes if len(shape) == 4), key=len)
            backward = "backward" in event.name
            flops = 2 * batch * heads * tokens * tokens * width * (2.5 if backward else 1.0)
            attention += flops / ATTENTION["backward" if backward else "forward"]
        else:
            kernels += event_seconds(event)
            num_kernels += max(1, len(event.launches))
            num_bytes += event.num_bytes
    return Estimate((gemms[0], gemms[1]), attention, kernels, num_kernels, num_bytes / 1e9)


def step(model: nn.Module, compile_model: Callable[[nn.Module], Any], x: torch.Tensor) -> list[Event]:
    """The launches of forward and backward."""
    torch._dynamo.reset()
    compiled = compile_model(model)
    with capture() as graphs:
        compiled(x).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        return replay(graphs, pathlib.Path(folder))


def _linears(tokens: int, shrink: int) -> list[tuple[nn.Module, torch.Tensor]]:
    from benchmarks.gemm_layer import LINEARS

    found = []
    for inputs, outputs in LINEARS.values():
        linear = nn.Linear(inputs // shrink, outputs // shrink, bias=False, dtype=torch.bfloat16)
        found.append((linear, torch.empty(tokens, inputs // shrink, dtype=torch.bfloat16, requires_grad=True)))
    return found


def _block(dim: int, ffn: int, heads: int, batch: int, tokens: int) -> list[tuple[nn.Module, torch.Tensor]]:
    x = torch.empty(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.device("meta"):
        block = LlamaBlock(dim, ffn, heads).bfloat16()
    return [(block.to_empty(device="cpu"), x)]


def workloads(quick: bool) -> dict[str, Callable[[], list[tuple[nn.Module, torch.Tensor]]]]:
    """Name -> models, each with its input."""
    if quick:
        return {"tiny block": lambda: _block(256, 512, 4, 1, 256)}
    return {"12 GEMMs": lambda: _linears(15872, 1), "8B block": lambda: _block(4096, 14336, 32, 2, 8192)}


def run(quick: bool) -> Result:
    rows, checks, notes = [], [], ["estimates from cubins and stated rates; nothing was timed"]
    for workload, models in workloads(quick).items():
        base = None
        for name, compile_model in contestants(("delayed", "current", "blockwise")).items():
            if quick and name not in ("bf16", "delayed"):
                continue
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
            rows.append(row)
    return Result(rows, "bf16 torch.compile", checks, notes, where())


if __name__ == "__main__":
    main("layer_cost", run)
