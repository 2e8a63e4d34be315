"""What every kernel costs on an H200, from its cubin: registers, occupancy, instructions, bytes in flight. Estimates; no GPU.

A row per kernel, for bfloat16 matrices of 4096 x 4096: casts in both formats, and Inductor's kernels of the Llama block
under each recipe. `benchmarks.layer_cost` makes layers of them, `benchmarks.hopper` explains the columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import hopper
from benchmarks.common import Result, main, require
from lowering.formats import E4M3, E5M2
from tests.support.cubin import Cubin, Launch, compile_launch, read_cubin, recorded

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
        program, resident = self.program, hopper.resident(self.program)
        elements = program.load_bytes / 2
        return {
            "what": self.name,
            "registers": program.registers,
            "shared KB": program.shared / 1024,
            "stack": self.cubin.stack,
            "programs / SM": resident,
            "warps / SM": resident * program.warps,
            "SASS": self.cubin.instructions,
            "executed": self.cubin.executed,
            "SASS / element": self.cubin.executed * 32 * program.warps / elements,
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
def _read(cubin: bytes) -> Cubin:
    return read_cubin(cubin)


def cost(name: str, launch: Launch, elements: int, load_bytes: float, store_bytes: float) -> Kernel:
    """Compile a launch that moves so many bytes per element of its matrices."""
    compiled = compile_launch(launch, 90)
    cubin = _read(compiled.asm["cubin"])
    metadata, share = compiled.metadata, elements / launch.programs
    program = hopper.Program(
        cubin.registers, metadata.shared, metadata.num_warps, cubin.executed, load_bytes * share, store_bytes * share
    )
    return Kernel(name, compiled.asm["ptx"], cubin, program)


@functools.cache
def cost_of(name: str, rows: int = SIZE, cols: int = SIZE) -> Kernel:
    """The first launch of a hand-written kernel on a bfloat16 matrix [rows, cols]."""
    launches, store_bytes = hand_written(rows, cols)[name]
    return cost(name, launches()[0], rows * cols, 2, store_bytes)


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
    return Result(rows, "a plain copy", checks, ["estimates from cubins; nothing was timed"], where())


if __name__ == "__main__":
    main("kernel_cost", run)
