"""The cost of a step along K of a Triton GEMM on a multiprocessor of an H200, from its cubin. Estimates; no GPU.

A row per GEMM: dense ones of 1x128 blocks, which cuBLASLt and DeepGEMM compute where they can, and those of experts. Clocks are
those of the whole program, whose warps share four schedulers and the tensor cores:

    issue   what the schedulers need for the loop's instructions
    tensor  what the tensor cores need for the tile's products
    L2      what the L2 cache needs to deliver the operands and factors of a step
    waits   how often a warp waits for all its products

A loop that waits for all its products does nothing else meanwhile: its step takes their time and that of the instructions, one
after the other, unless programs that share the multiprocessor fill each other's gaps. "share of the tensor cores" is what the
slower of that and the L2 cache leaves of their rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch

from benchmarks import h100_model
from benchmarks.catalogue import factors_of, fp8
from benchmarks.common import main
from benchmarks.cubin import Instruction, dump, instructions_of, loops_of, read_cubin
from benchmarks.isolation import Bench, Row
from benchmarks.kernel_cost import where
from benchmarks.variants import Launch, compile_launch, recorded
from lowering import hardware
from lowering.blockwise.reference import BlockwiseGemm, gemm_ready_scale_shape
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped.reference import GroupedGemm, alignment, padded_width

#: Sizes of Qwen3-30B-A3B's experts with 16384 tokens, 8 experts each; and of a dense linear.
EXPERTS, ROWS, HIDDEN, FFN = 128, 131072, 2048, 768
DENSE = (8192, 4096, 4096)

_TENSOR, _LINE, _ONE, _TWO = (
    Granularity.TENSOR_WISE,
    Granularity.ROW_WISE,
    Granularity.BLOCK_1X128,
    Granularity.BLOCK_128X128,
)


def _dense(a_kind: Granularity, b_kind: Granularity, a_dtype: torch.dtype = E4M3) -> list[Launch]:
    from lowering.blockwise.kernels import scaled_mm_blockwise

    m, n, k = DENSE
    kinds: dict[str, Any] = {"granularity_a": a_kind.value, "granularity_b": b_kind.value}
    scales = [torch.empty(gemm_ready_scale_shape(outer, k, kind)) for kind, outer in ((a_kind, m), (b_kind, n))]
    operands = fp8(m, k, dtype=a_dtype), fp8(n, k).mT, *scales
    return recorded(scaled_mm_blockwise, BlockwiseGemm(*operands, None, **kinds, out_dtype=torch.bfloat16))


def _grouped(operands: tuple[torch.Tensor, ...], kinds: tuple[Granularity, Granularity], fast_accum: bool) -> list[Launch]:
    from lowering.grouped.kernels import gemm

    options: dict[str, Any] = {"granularity_a": kinds[0].value, "granularity_b": kinds[1].value, "fast_accum": fast_accum}
    with mock.patch.object(hardware, "cuda_capability", return_value=(9, 0)):
        return recorded(gemm.scaled_grouped_mm, GroupedGemm(*operands, **options))


def _rows_by_experts(
    a_kind: Granularity, b_kind: Granularity, dtype: torch.dtype = E4M3, fast_accum: bool = False
) -> list[Launch]:
    offs = torch.empty(EXPERTS, dtype=torch.int32)
    scales = factors_of(a_kind, ROWS, HIDDEN), factors_of(b_kind, FFN, HIDDEN, EXPERTS)
    return _grouped((fp8(ROWS, HIDDEN, dtype=dtype), fp8(EXPERTS, FFN, HIDDEN).mT, *scales, offs), (a_kind, b_kind), fast_accum)


def _grad_weight(kind: Granularity) -> list[Launch]:
    offs, width = torch.empty(EXPERTS, dtype=torch.int32), padded_width(ROWS, EXPERTS, alignment(kind))
    scales = [factors_of(kind, outer, width, EXPERTS if kind is _LINE else 0) for outer in (FFN, HIDDEN)]
    return _grouped((fp8(FFN, width, dtype=E5M2), fp8(HIDDEN, width).mT, *scales, offs), (kind, kind), False)


#: The launches of each GEMM.
GEMMS: dict[str, Callable[[], list[Launch]]] = {
    "dense 1x128 by 128x128": lambda: _dense(_ONE, _TWO),
    "dense 1x128 by 1x128": lambda: _dense(_ONE, _ONE, E5M2),
    "experts output, per tensor, fast accumulation": lambda: _rows_by_experts(_TENSOR, _TENSOR, fast_accum=True),
    "experts output, rowwise": lambda: _rows_by_experts(_LINE, _LINE),
    "experts output, blockwise": lambda: _rows_by_experts(_ONE, _TWO),
    "experts grad_input, per tensor": lambda: _rows_by_experts(_TENSOR, _TENSOR, E5M2),
    "experts grad_input, blockwise": lambda: _rows_by_experts(_ONE, _TWO, E5M2),
    "experts grad_weight, per tensor": lambda: _grad_weight(_TENSOR),
    "experts grad_weight, rowwise": lambda: _grad_weight(_LINE),
    "experts grad_weight, blockwise": lambda: _grad_weight(_ONE),
}


#: Bytes that the L2 cache delivers at least.
_SECTOR = 32


def loop_along_k(program: list[Instruction]) -> list[Instruction]:
    """The body of the innermost loop with products of the tensor cores."""
    bodies = [program[first : last + 1] for first, last in loops_of(program)]
    return min((body for body in bodies if _count(body, "[QH]GMMA")), key=len)


def _count(body: list[Instruction], pattern: str) -> int:
    return sum(re.match(pattern, instruction.text) is not None for instruction in body)


def _row(name: str, launches: Callable[[], list[Launch]], bench: Bench) -> Row:
    from lowering.grouped.kernels.gemm import BLOCK_2D

    launch = launches()[-1]
    compiled = compile_launch(launch, 90)
    cubin, metadata = read_cubin(compiled.asm["cubin"]), compiled.metadata
    body = loop_along_k(instructions_of(dump(compiled.asm["cubin"], "-sass")))
    m, n, k = (launch.arguments[f"BLOCK_{letter}"] for letter in "MNK")
    products = sum(math.prod(map(int, found[1].split("x"))) for i in body if (found := re.match(r"QGMMA\.(\w+?)\.", i.text)))
    steps = products * metadata.num_warps // 4 / (m * n * k)
    bench.require(steps == int(steps) >= 1, f"{name}: the loop's products are those of whole tiles")
    loads = _count(body, r"LDG\.")
    issue = len(body) * metadata.num_warps / h100_model.SCHEDULERS / steps
    tensor = m * n * k / h100_model.FP8_PRODUCTS
    # Warps that load the same factors find them in L1. Those of neighbouring lines that do not lie together take a sector each.
    are_apart = [launch.arguments.get(f"scale_{side}_line", 1) != 1 for side in "ab"]
    are_apart[1] &= launch.arguments.get("KIND_B") != BLOCK_2D.value
    of_lines = [_SECTOR if apart else 4 for apart in are_apart]
    num_bytes = (m + n) * k + bool(loads) * (m * of_lines[0] + n * of_lines[1])
    waits = _count(body, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")
    resident = h100_model.resident(h100_model.Program(cubin.registers, metadata.shared, metadata.num_warps, 0, 0, 0))
    l2 = h100_model.memory_clocks(num_bytes, h100_model.L2_BANDWIDTH)
    step = (tensor + issue) / resident if waits else 0
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
        "share of the tensor cores": tensor / max(step, tensor, issue, l2),
    }


def run(bench: Bench) -> Iterable[Row]:
    """`quick`: three GEMMs."""
    bench.baseline, bench.where = "the tensor cores' rate", where()
    bench.notes.append("estimates from cubins, per step along K; nothing was timed")
    gemms = list(GEMMS.items())[: 3 if bench.quick else None]
    return (row for name, launches in gemms for row in bench.row(name, _row, name, launches, bench))


if __name__ == "__main__":
    main("gemm_steps", run)
