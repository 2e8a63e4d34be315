"""The cost of every kernel on an H200, from its cubin: registers, occupancy, instructions, bytes in flight. Estimates; no GPU.

    python -m benchmarks.kernel_cost --what casts gemms

casts: the hand-written ones in both formats, of bfloat16 matrices of 4096 x 4096; `benchmarks.h100_model` explains the columns.
gemms: a step along K of Triton's GEMMs, dense ones of 1x128 blocks and those of experts. Clocks are those of a program, whose
warps share four schedulers and the tensor cores: "issue", of the loop's instructions; "tensor", of the tile's products; "L2",
until the operands and factors are delivered. A loop that waits for its products ("waits") does nothing else meanwhile, unless
another program on the same multiprocessor fills the gap. "share of the tensor cores" is what the slowest of these leaves of
their rate.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import h100_model
from benchmarks.casts import HandWritten, hand_written
from benchmarks.catalogue import factors_of
from benchmarks.catalogue import fp8 as empty_fp8
from benchmarks.common import main
from benchmarks.cubin import Cubin, Instruction, dump, instructions_of, loops_of, read_cubin
from benchmarks.isolation import Bench, Row
from benchmarks.variants import Launch, compile_launch, recorded
from lowering import hardware
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.operation import NAMESPACE
from lowering.products import Product

SIZE = 4096


class Kernel(NamedTuple):
    """A kernel as compiled, and its estimate."""

    name: str
    ptx: str
    cubin: Cubin
    program: h100_model.Program

    def moves_the_tile(self) -> dict[str, bool]:
        """For loads and stores: True if the counted instructions load and store a program's bytes."""
        threads = 32 * self.program.warps
        return {
            "load": self.cubin.load_bytes * threads >= self.program.load_bytes,
            "store": self.cubin.store_bytes * threads >= self.program.store_bytes,
        }

    def row(self) -> dict[str, Any]:
        per_element = self.cubin.executed * 32 * self.program.warps / (self.program.load_bytes / 2)
        limit = bound(self.name)
        extra = {
            "bound on issue / memory": "none" if limit is None else limit,
            "stack": self.cubin.stack,
            "SASS": self.cubin.instructions,
            "SASS / element": per_element,
        }
        return _row(self.name, self.program) | extra


def _row(name: str, program: h100_model.Program) -> dict[str, Any]:
    resident = h100_model.resident(program)
    return {
        "what": name,
        "registers": program.registers,
        "shared KB": program.shared / 1024,
        "programs / SM": resident,
        "warps / SM": resident * program.warps,
        "executed": program.instructions,
        "KB in flight": h100_model.bytes_in_flight(program) / 1024,
        "issue / memory": h100_model.issue_to_memory(program),
        "share of copy": h100_model.share_of_copy(program),
    }


def bound(name: str) -> float | None:
    """The most that tests/lowering/test_kernel_cost.py lets a hand-written kernel take of `issue / memory`; None: no bound.

    Amaxes have none: they are read, nothing is written. Nor have casts that gather rows: addresses of rows are theirs alone.
    """
    return None if name.startswith(("amax", "multi_amax", "columns")) else 0.65


@functools.cache
def _read(cubin: bytes, loop_steps: int) -> Cubin:
    return read_cubin(cubin, loop_steps)


def program_of(compiled: Any, loop_steps: int, load_bytes: float, store_bytes: float) -> h100_model.Program:
    """A compiled kernel, of which each program moves so many bytes."""
    cubin, metadata = _read(compiled.asm["cubin"], loop_steps), compiled.metadata
    return h100_model.Program(cubin.registers, metadata.shared, metadata.num_warps, cubin.executed, load_bytes, store_bytes)


def loop_steps(launch: Launch, elements: float) -> int:
    """The number of steps of a program's loop over so many elements; 1 where a program has one tile."""
    is_amax = launch.kernel.__name__ == "multi_amax_kernel" and "BLOCK" in launch.arguments  # the one of lowering.tensorwise
    return max(1, math.ceil(elements / launch.arguments["BLOCK"])) if is_amax else 1


def cost(name: str, launch: Launch, elements: int, load_bytes: float, store_bytes: float) -> Kernel:
    """Compile a launch that moves so many bytes per element of its matrices."""
    compiled = compile_launch(launch, 90)
    share = elements / launch.programs
    steps = loop_steps(launch, share)
    program = program_of(compiled, steps, load_bytes * share, store_bytes * share)
    return Kernel(name, compiled.asm["ptx"], _read(compiled.asm["cubin"], steps), program)


@functools.cache
def kernels() -> dict[str, HandWritten]:
    """The hand-written kernels by name, on a matrix [SIZE, SIZE]."""
    return hand_written(torch.empty((SIZE, SIZE), dtype=torch.bfloat16))


def launches(name: str) -> list[Launch]:
    """All launches of a hand-written kernel's operation."""
    kernel = kernels()[name]
    function = NAMESPACE.operations[kernel.operation].implementations()[-2]  # the last is the reference
    return recorded(function, *kernel.arguments, **kernel.options)


@functools.cache
def cost_of(name: str) -> Kernel:
    """The main launch of a hand-written kernel on a matrix [SIZE, SIZE]."""
    kernel = kernels()[name]
    return cost(name, launches(name)[kernel.position], kernel.elements, kernel.load_bytes, kernel.store_bytes)


def _hand_written_row(name: str, bench: Bench) -> Row:
    kernel = cost_of(name)
    for kind, is_moved in kernel.moves_the_tile().items():
        bench.require(is_moved, f"{name}: the counted instructions {kind} the tile")
    return kernel.row()


def casts(bench: Bench) -> Iterator[Row]:
    """`quick`: three kernels."""
    _begin(bench, "a plain copy")
    for name in list(kernels())[: 3 if bench.quick else None]:
        yield from bench.row(name, _hand_written_row, name, bench)


def _begin(bench: Bench, baseline: str) -> None:
    bench.baseline = baseline
    bench.notes.append("estimates from cubins; nothing was timed")


# -- GEMMs

_TENSOR, _LINE, _ONE, _TWO = Granularity.TENSOR_WISE, Granularity.ROW_WISE, Granularity.BLOCK_1X128, Granularity.BLOCK_128X128
#: Name -> what is multiplied, the kinds of scales of a and b, the format of a, fast accumulation.
GEMMS: dict[str, tuple[str, Granularity, Granularity, torch.dtype, bool]] = {
    "dense 1x128 by 128x128": ("dense", _ONE, _TWO, E4M3, False),
    "dense 1x128 by 1x128": ("dense", _ONE, _ONE, E5M2, False),
    "experts output, per tensor, fast accumulation": ("rows", _TENSOR, _TENSOR, E4M3, True),
    "experts output, rowwise": ("rows", _LINE, _LINE, E4M3, False),
    "experts output, blockwise": ("rows", _ONE, _TWO, E4M3, False),
    "experts grad_input, per tensor": ("rows", _TENSOR, _TENSOR, E5M2, False),
    "experts grad_input, blockwise": ("rows", _ONE, _TWO, E5M2, False),
    "experts grad_weight, per tensor": ("columns", _TENSOR, _TENSOR, E5M2, False),
    "experts grad_weight, rowwise": ("columns", _LINE, _LINE, E5M2, False),
    "experts grad_weight, blockwise": ("columns", _ONE, _ONE, E5M2, False),
}
#: Bytes that the L2 cache delivers at least.
_SECTOR = 32


def _launch(form: str, of_a: Granularity, of_b: Granularity, dtype: torch.dtype, fast_accum: bool) -> Launch:
    """Of a linear with 8192 rows, or of Qwen3-30B-A3B's experts with 16384 tokens, 8 experts each."""
    from lowering.blockwise.kernels import multiply
    from lowering.grouped.gemm_kernels import scaled_grouped_mm

    options: dict[str, Any] = {"granularity_a": of_a.value, "granularity_b": of_b.value, "out_dtype": torch.bfloat16}
    if form == "dense":
        m, n, k = 8192, 4096, 4096
        scales = [torch.empty(gemm_ready_scale_shape(outer, k, kind)) for kind, outer in ((of_a, m), (of_b, n))]
        return recorded(multiply, Product(empty_fp8(m, k, dtype=dtype), empty_fp8(n, k).mT, *scales, None, **options))[-1]
    experts, rows, hidden, ffn = 128, 131072, 2048, 768
    if form == "rows":
        operands = empty_fp8(rows, hidden, dtype=dtype), empty_fp8(experts, ffn, hidden).mT
        scales = [factors_of(of_a, rows, hidden), factors_of(of_b, ffn, hidden, experts)]
    else:
        width = padded_width(rows, experts, alignment(of_a))
        operands = empty_fp8(ffn, width, dtype=dtype), empty_fp8(hidden, width).mT
        scales = [factors_of(of_a, outer, width, experts if of_a is _LINE else 0) for outer in (ffn, hidden)]
    offs = torch.empty(experts, dtype=torch.int32)
    with mock.patch.object(hardware, "cuda_capability", return_value=(9, 0)):
        return recorded(scaled_grouped_mm, GroupedGemm(*operands, *scales, offs, fast_accum=fast_accum, **options))[-1]


def _count(body: list[Instruction], pattern: str) -> int:
    return sum(re.match(pattern, instruction.text) is not None for instruction in body)


def _gemm_row(name: str, bench: Bench) -> Row:
    launch = _launch(*GEMMS[name])
    compiled = compile_launch(launch, 90)
    cubin, metadata = read_cubin(compiled.asm["cubin"]), compiled.metadata
    instructions = instructions_of(dump(compiled.asm["cubin"], "-sass"))
    bodies = [instructions[first : last + 1] for first, last in loops_of(instructions)]
    body = min((body for body in bodies if _count(body, "[QH]GMMA")), key=len)  # the innermost loop with products
    m, n, k = (launch.arguments[f"BLOCK_{letter}"] for letter in "MNK")
    products = sum(math.prod(map(int, found[1].split("x"))) for i in body if (found := re.match(r"QGMMA\.(\w+?)\.", i.text)))
    steps = products * metadata.num_warps // 4 / (m * n * k)
    bench.require(steps == int(steps) >= 1, f"{name}: the loop's products are those of whole tiles")
    loads = _count(body, r"LDG\.")
    issue = len(body) * metadata.num_warps / h100_model.SCHEDULERS / steps
    tensor = m * n * k / h100_model.FP8_PRODUCTS
    # Warps that load the same factors find them in L1. Those of neighbouring lines that do not lie together take a sector each.
    is_apart = [launch.arguments.get(f"scale_{side}_line", 1) != 1 for side in "ab"]
    of_lines = [_SECTOR if apart else 4 for apart in (is_apart[0], is_apart[1] and GEMMS[name][2] is not _TWO)]
    num_bytes = (m + n) * k + bool(loads) * (m * of_lines[0] + n * of_lines[1])
    waits = _count(body, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")
    resident = h100_model.resident(h100_model.Program(cubin.registers, metadata.shared, metadata.num_warps, 0, 0, 0))
    l2 = h100_model.memory_clocks(num_bytes, h100_model.L2_BANDWIDTH)
    return {
        "what": name,
        "tile": f"{m} x {n} x {k}",
        "registers": cubin.registers,
        "programs / SM": resident,
        "instructions": len(body) / steps,
        "loads of factors": loads / steps,
        "issue clocks": issue,
        "tensor clocks": tensor,
        "L2 clocks": l2,
        "waits": waits / steps,
        "share of the tensor cores": tensor / max((tensor + issue) / resident if waits else 0, tensor, issue, l2),
    }


def gemms(bench: Bench) -> Iterator[Row]:
    """`quick`: three GEMMs."""
    _begin(bench, "the tensor cores' rate")
    for name in list(GEMMS)[: 3 if bench.quick else None]:
        yield from bench.row(name, _gemm_row, name, bench)


PARTS = {"casts": casts, "gemms": gemms}

if __name__ == "__main__":
    main("kernel_cost", PARTS)
