"""What every kernel costs on an H200, from its cubin: registers, occupancy, instructions, bytes in flight. Estimates; no GPU.

A row per kernel: the casts in both formats, of bfloat16 matrices of 4096 x 4096, and what Inductor generates for the block
of an 8B Llama under each recipe. `benchmarks.layer_cost` makes layers of them, `benchmarks.hopper` explains the columns.
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
from benchmarks.peers import contestants
from lowering.formats import E4M3, E5M2
from tests.support.cross_codegen import capture
from tests.support.cubin import Cubin, Launch, compile_launch, read_cubin, recorded
from tests.support.models import LlamaBlock
from tests.support.ptx import compile_config
from tests.support.replay import Event, replay

SIZE = 4096


def where() -> str:
    """The Triton whose code it is: the name of the results."""
    import triton

    return f"triton-{triton.__version__}"


class Kernel(NamedTuple):
    """A kernel as compiled, and its estimate."""

    name: str
    ptx: str
    cubin: Cubin
    program: hopper.Program

    def row(self) -> dict[str, Any]:
        per_element = self.cubin.executed * 32 * self.program.warps / (self.program.load_bytes / 2)
        extra = {"stack": self.cubin.stack, "SASS": self.cubin.instructions, "SASS / element": per_element}
        return _row(self.name, self.program) | extra


def _row(name: str, program: hopper.Program) -> dict[str, Any]:
    resident = hopper.resident(program)
    return {
        "what": name,
        "registers": program.registers,
        "shared KB": program.shared / 1024,
        "programs / SM": resident,
        "warps / SM": resident * program.warps,
        "executed": program.instructions,
        "KB in flight": hopper.bytes_in_flight(program) / 1024,
        "issue / memory": hopper.issue_to_memory(program),
        "share of copy": hopper.share_of_copy(program),
    }


def _matrix(rows: int = SIZE, cols: int = SIZE) -> torch.Tensor:
    return torch.empty((rows, cols), dtype=torch.bfloat16)


def hand_written(rows: int = SIZE, cols: int = SIZE) -> dict[str, tuple[Callable[[], list[Launch]], float]]:
    """Name -> how to launch the kernel on a bfloat16 matrix, and the bytes that it stores per element."""
    from lowering import kernels
    from lowering.kernels import blockwise_cast

    x, scale = _matrix(rows, cols), torch.tensor(2.0)
    found: dict[str, tuple[Callable[[], list[Launch]], float]] = {}
    for name, fp8 in (("e4m3", E4M3), ("e5m2", E5M2)):
        for amax in ("", "_amax"):
            cast, both = getattr(kernels, f"cast{amax}"), getattr(kernels, f"cast_transpose{amax}")
            found[f"cast{amax} {name}"] = functools.partial(recorded, cast, x, scale, fp8), 1
            found[f"cast{amax} columnwise {name}"] = functools.partial(recorded, cast, x, scale, fp8, True), 1
            found[f"cast_transpose{amax} {name}"] = functools.partial(recorded, both, x, scale, fp8), 2
        multi = kernels.multi_cast_transpose_amax
        found[f"multi_cast_transpose_amax {name}"] = functools.partial(recorded, multi, [x], torch.ones(1), fp8), 2
        found[f"quantize {name}"] = functools.partial(recorded, kernels.quantize, x, scale, fp8), 1
        for dims, block in ((1, "1x128"), (2, "128x128")):
            copies, scales = blockwise_cast.cast_transpose_blockwise, 4 / 128**dims
            found[f"blockwise {block} both {name}"] = functools.partial(recorded, copies, x, fp8, dims), 2 + 2 * scales
            for columnwise in (False, True):
                kind, one = "columnwise" if columnwise else "rowwise", blockwise_cast.cast_blockwise
                launches = functools.partial(recorded, one, x, fp8, dims, columnwise)
                found[f"blockwise {block} {kind} {name}"] = launches, 1 + scales
    found["amax"] = functools.partial(recorded, kernels.amax, x), 0
    return found


@functools.cache
def _read(cubin: bytes, loop_steps: int) -> Cubin:
    return read_cubin(cubin, loop_steps)


def program_of(compiled: Any, loop_steps: int, load_bytes: float, store_bytes: float) -> hopper.Program:
    """A compiled kernel, of which each program moves so many bytes."""
    cubin, metadata = _read(compiled.asm["cubin"], loop_steps), compiled.metadata
    return hopper.Program(cubin.registers, metadata.shared, metadata.num_warps, cubin.executed, load_bytes, store_bytes)


def cost(name: str, launch: Launch, elements: int, load_bytes: float, store_bytes: float) -> Kernel:
    """Compile a launch that moves so many bytes per element of its matrices."""
    compiled = compile_launch(launch, 90)
    share = elements / launch.programs
    program = program_of(compiled, 1, load_bytes * share, store_bytes * share)
    return Kernel(name, compiled.asm["ptx"], _read(compiled.asm["cubin"], 1), program)


@functools.cache
def cost_of(name: str, rows: int = SIZE, cols: int = SIZE) -> Kernel:
    """The first launch of a hand-written kernel on a bfloat16 matrix [rows, cols]."""
    launches, store_bytes = hand_written(rows, cols)[name]
    return cost(name, launches()[0], rows * cols, 2, store_bytes)


def block(dim: int, ffn: int, heads: int, batch: int, tokens: int) -> list[tuple[nn.Module, torch.Tensor]]:
    """A Llama block and its input [batch, tokens, dim], bfloat16, uninitialized."""
    x = torch.empty(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.device("meta"):
        model = LlamaBlock(dim, ffn, heads).bfloat16()
    return [(model.to_empty(device="cpu"), x)]


def step(model: nn.Module, compile_model: Callable[[nn.Module], Any], x: torch.Tensor) -> list[Event]:
    """The launches of forward and backward."""
    torch._dynamo.reset()
    compiled = compile_model(model)
    with capture() as graphs:
        compiled(x).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        return replay(graphs, pathlib.Path(folder))


def generated_programs(event: Event) -> list[hopper.Program]:
    """A program of Inductor's kernel in each of its configurations."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kernel, found = event.generated, []
    sizes = {"in": 0, "out": 0}
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
        found.append(program_of(compile_config(kernel, config), steps, sizes["in"] * share, sizes["out"] * share))
    return found


def generated(quick: bool) -> list[dict[str, Any]]:
    """Rows of Inductor's kernels in the block of an 8B Llama, 2 x 8192 tokens, that move a megabyte at least."""
    shape = (256, 512, 4, 1, 1024) if quick else (4096, 14336, 32, 2, 8192)
    rows = []
    for recipe, compile_model in contestants(("delayed", "current", "blockwise")).items():
        if recipe.startswith("torchao") or (quick and recipe != "delayed"):
            continue
        for event in [event for model, x in block(*shape) for event in step(model, compile_model, x)]:
            if event.generated is None or event.num_bytes < 1e6:
                continue
            program = max(generated_programs(event), key=hopper.share_of_copy)
            rows.append(_row(f"{recipe} {event.name}", program))
    return rows


def run(quick: bool) -> Result:
    """`quick`: three kernels."""
    rows, checks = [], []
    for name in list(hand_written())[: 3 if quick else None]:
        kernel = cost_of(name)
        threads = 32 * kernel.program.warps
        for kind, counted, moved in (
            ("load", kernel.cubin.load_bytes, kernel.program.load_bytes),
            ("store", kernel.cubin.store_bytes, kernel.program.store_bytes),
        ):
            require(counted * threads >= moved, f"{name}: the counted instructions {kind} the tile", checks)
        rows.append(kernel.row())
    rows += generated(quick)
    return Result(rows, "a plain copy", checks, ["estimates from cubins; nothing was timed"], where())


if __name__ == "__main__":
    main("kernel_cost", run)
