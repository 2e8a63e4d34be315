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
import itertools
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from benchmarks import h100_model
from benchmarks.catalogue import factors_of
from benchmarks.catalogue import fp8 as empty_fp8
from benchmarks.common import main
from benchmarks.cross_codegen import Event, capture, compile_config, replay
from benchmarks.cubin import Cubin, Instruction, dump, instructions_of, loops_of, read_cubin
from benchmarks.isolation import Bench, Row
from benchmarks.models import LlamaBlock
from benchmarks.variants import Launch, compile_launch, recorded
from lowering import hardware
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import BLOCK, E4M3, E5M2, GEMM_ALIGNMENT, MX_BLOCK, Granularity
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.operation import NAMESPACE
from lowering.products import Product

SIZE = 4096
_FP8 = (("e4m3", E4M3), ("e5m2", E5M2))


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


def _matrix(rows: int = SIZE, cols: int = SIZE) -> torch.Tensor:
    return torch.empty((rows, cols), dtype=torch.bfloat16)


def bound(name: str) -> float | None:
    """The most that tests/lowering/test_kernel_cost.py lets a hand-written kernel take of `issue / memory`; None: no bound.

    Amaxes have none: they are read, nothing is written. Nor have casts that gather rows: addresses of rows are theirs alone.
    """
    return None if name.startswith(("amax", "multi_amax", "columns")) else 0.65


class HandWritten(NamedTuple):
    """A kernel: the call of an operation that launches it on a bfloat16 matrix or on one of FP8, and what it moves."""

    operation: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    elements: int
    """Elements of the matrix."""
    store_bytes: float
    """Per element."""
    load_bytes: float = 2
    position: int = 0
    """The kernel's place among the operation's launches."""

    @property
    def transposes(self) -> bool:
        """True if a copy is written in the other layout."""
        return bool(self.options.get("columnwise")) or "transposed" in self.operation or "columns" in self.operation

    def launches(self) -> list[Launch]:
        """All launches of the operation."""
        function = NAMESPACE.operations[self.operation].implementations()[-2]  # the last is the reference
        return recorded(function, *self.arguments, **self.options)


def hand_written(x: torch.Tensor) -> dict[str, HandWritten]:
    """The kernels by name, to be launched on the bfloat16 matrix x."""
    scale = torch.tensor(2.0, device=x.device)
    found: dict[str, HandWritten] = {}

    def add(name: str, store_bytes: float, operation: str, *arguments: Any, **options: Any) -> None:
        elements = sum(matrix.numel() for matrix in arguments[0]) if isinstance(arguments[0], list) else x.numel()
        found[name] = HandWritten(operation, arguments, options, elements, store_bytes)

    columnwise = {"rowwise": False, "columnwise": True}
    copies: dict[str, tuple[int, dict[str, Any]]] = {
        "both": (2, {"columnwise": True}), "rowwise": (1, {}), "columnwise": (1, columnwise),
    }  # fmt: skip
    for name, fp8 in _FP8:
        alone, many = ([x], [scale], fp8), ([x, x], [scale, scale], fp8)
        for amax in ("", "_amax"):
            how = {"with_amax": bool(amax)}
            add(f"cast{amax} {name}", 1, "cast", *alone, **how)
            add(f"cast{amax} columnwise {name}", 1, "cast", *alone, **columnwise, **how)
            add(f"cast_transpose{amax} {name}", 2, "cast", *alone, columnwise=True, **how)
            add(f"multi_cast{amax} rowwise {name}", 1, "cast", *many, **how)
            add(f"multi_cast{amax} columnwise {name}", 1, "cast", *many, **columnwise, **how)
        add(f"multi_cast_transpose_amax {name}", 2, "cast", *many, columnwise=True, with_amax=True)
        add(f"transposed_copy {name}", 1, "transposed_copy", x.view(torch.uint8)[:, : x.shape[1]].view(fp8))
        found[f"transposed_copy {name}"] = found[f"transposed_copy {name}"]._replace(load_bytes=1)
        add(f"quantize {name}", 1, "quantize", x, scale, fp8)
        for granularity, block in ((Granularity.BLOCK_1X128, "1x128"), (Granularity.BLOCK_128X128, "128x128")):
            scales = 4 / (BLOCK if granularity == Granularity.BLOCK_1X128 else BLOCK * BLOCK)
            for (kind, (num, copy)), (multi, xs) in itertools.product(copies.items(), (("", [x]), ("multi ", [x, x]))):
                store_bytes = num + num * scales
                label = f"blockwise {block} {multi}{kind} {name}"
                add(label, store_bytes, "cast_with_scales", xs, fp8, granularity=granularity.value, **copy)
        for block, square in (("1x32", False), ("32x32", True)):
            how = {"granularity": Granularity.BLOCK_1X32.value, "square": square}
            for kind, (num, copy) in copies.items():
                add(f"mxfp8 {block} {kind} {name}", num + num / MX_BLOCK, "cast_with_scales", [x], fp8, **how, **copy)
    add("amax", 0, "amaxes", [x])
    add("multi_amax", 0, "amaxes", [x, x])
    _add_rowwise(add, x)
    _add_grouped(add, found, x)
    return found


def _add_grouped(add: Callable[..., None], found: dict[str, HandWritten], x: torch.Tensor) -> None:
    """Casts of 8 matrices, and columnwise copies of rows in 8 groups, whose first launch says where each row goes."""
    batch, scales = x.view(8, -1, x.shape[1]), torch.ones(8, device=x.device)
    offs = (torch.arange(1, 9, device=x.device) * (x.shape[0] // 8)).int()
    index = torch.arange(x.shape[0], device=x.device)

    def add_columns(name: str, align: int, position: int, load_bytes: float, *call: Any, **options: Any) -> None:
        add(name, *call, offs, *[index] * ("rowwise" not in options), **options)
        elements = padded_width(x.shape[0], 8, align) * x.shape[1]
        found[name] = found[name]._replace(position=position, elements=elements, load_bytes=load_bytes)

    add("amax_batch", 0, "amaxes", [batch], per_matrix=True)
    for name, fp8 in _FP8:
        add(f"cast_batch_amax {name}", 1, "cast", [batch], [scales], fp8, with_amax=True)
        add(f"cast_batch columnwise {name}", 1, "cast", [batch], [scales], fp8, rowwise=False, columnwise=True)
        add(f"cast_transpose_batch_amax {name}", 2, "cast", [batch], [scales], fp8, columnwise=True, with_amax=True)
        block = {"granularity": Granularity.BLOCK_128X128.value}
        add(f"batch 128x128 both {name}", 2, "cast_with_scales", [batch], fp8, **block, columnwise=True)
        lines = f"cast_lines_rowwise batch both {name}"
        add(lines, 2, "cast_with_scales", [batch], fp8, granularity="row_wise", columnwise=True)
        found[lines] = found[lines]._replace(position=1)  # the amaxes come first
        found["amax_rowwise batch both"] = found[lines]._replace(position=0, store_bytes=0)
        cast = "cast_columns", x, fp8
        add_columns(f"columns 1x128 {name}", BLOCK, 1, 2, 1 + 4 / BLOCK, *cast, granularity="block_1x128")
        both = {"granularity": "block_1x128", "rowwise": True}
        add_columns(f"columns 1x128 and rows {name}", BLOCK, 1, 2, 2 + 8 / BLOCK, *cast, **both)
        add_columns(f"columns rowwise {name}", GEMM_ALIGNMENT, 2, 2, 1, *cast, granularity="row_wise")
    add_columns("columns moved", GEMM_ALIGNMENT, 1, 1, 1, "transposed_copy", x.view(torch.uint8)[:, : x.shape[1]].view(E4M3))


def _add_rowwise(add: Callable[..., None], x: torch.Tensor) -> None:
    """The two passes of the rowwise casts, of one matrix and of its halves."""
    halves = list(x.tensor_split(2))
    for kind, (rowwise, columnwise) in {"rows": (True, False), "columns": (False, True), "both": (True, True)}.items():
        lines = {"rowwise": rowwise, "columnwise": columnwise}
        for how, xs in (("", [x]), ("multi ", halves)):
            add(f"amax_rowwise {how}{kind}", 0, "amax_rowwise", xs, **lines)
            amaxes = torch.ones(sum(m.shape[0] * rowwise + m.shape[1] * columnwise for m in xs), device=x.device)
            for name, fp8 in _FP8:  # few programs store scales
                label = f"cast_lines_rowwise {how}{kind} {name}"
                add(label, rowwise + columnwise, "cast_lines_rowwise", xs, amaxes, fp8, **lines)


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
def cost_of(name: str, rows: int = SIZE, cols: int = SIZE) -> Kernel:
    """The main launch of a hand-written kernel on a matrix [rows, cols]."""
    kernel = hand_written(_matrix(rows, cols))[name]
    launch = kernel.launches()[kernel.position]
    return cost(name, launch, kernel.elements, kernel.load_bytes, kernel.store_bytes)


def block(
    dim: int, ffn: int, heads: int, batch: int, tokens: int, kv_heads: int | None = None
) -> list[tuple[nn.Module, torch.Tensor]]:
    """A Llama block and its input [batch, tokens, dim], bfloat16, uninitialized."""
    x = torch.empty(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.device("meta"):
        model = LlamaBlock(dim, ffn, heads, kv_heads).bfloat16()
    return [(model.to_empty(device="cpu"), x)]


def step(model: nn.Module, compile_model: Callable[[nn.Module], Any], x: torch.Tensor) -> list[Event]:
    """The launches of forward and backward."""
    torch._dynamo.reset()
    compiled = compile_model(model)
    with capture() as graphs:
        compiled(x).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        return replay(graphs, pathlib.Path(folder))


def generated_programs(event: Event) -> list[h100_model.Program]:
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


def _hand_written_row(name: str, bench: Bench) -> Row:
    kernel = cost_of(name)
    for kind, is_moved in kernel.moves_the_tile().items():
        bench.require(is_moved, f"{name}: the counted instructions {kind} the tile")
    return kernel.row()


def casts(bench: Bench) -> Iterator[Row]:
    """`quick`: three kernels."""
    _begin(bench, "a plain copy")
    for name in list(hand_written(_matrix()))[: 3 if bench.quick else None]:
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
