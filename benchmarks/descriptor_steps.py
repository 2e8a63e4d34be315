"""What tensor descriptors and a persistent grid would change in the grouped GEMMs of rows by experts, from cubins. No GPU.

Each GEMM as `lowering/grouped/kernels/gemm.py` has it, and variants of its kernel, which exist here only:

    descriptors   operands are loaded through `tl.make_tensor_descriptor`: one for all rows of a, one for the batch of b
    persistent    as many programs as fit on the GPU, each of which loops over tiles
    flattened     that loop and the one along K are one (`tl.range(flatten=True)`), which can load for the next tile early

The columns of `benchmarks.gemm_steps`, and of the whole kernel: its shared memory, its instructions and bytes of stack,
instructions of its PTX that copy by TMA and without, and the global scratch that each program needs for its descriptors.
Instructions of a flattened loop include those between tiles, most of which a step along K skips: no clocks are estimated.

Triton's interpreter first computes small products with each variant, which must be those of the kernel bit for bit.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from benchmarks.common import ROOT, Result, main, require
from benchmarks.cubin import read_cubin
from benchmarks.gemm_steps import GEMMS, row_of
from benchmarks.isolation import Attempts
from benchmarks.kernel_cost import where
from benchmarks.variants import Launch, compile_launch
from lowering.formats import E4M3, Granularity
from lowering.grouped.kernels import gemm
from lowering.grouped.kernels.gemm import BLOCK_1D, LINE, finished, line_factors, product, tile_in_group, tile_of_band
from lowering.grouped.reference import GroupedGemm
from tests.support.catalogue import factors_of

#: Flags of the variants of the kernel.
VARIANTS = {
    "descriptors": {"DESCRIPTORS": True, "PERSISTENT": False, "FLATTENED": False},
    "persistent": {"DESCRIPTORS": False, "PERSISTENT": True, "FLATTENED": False},
    "persistent, descriptors": {"DESCRIPTORS": True, "PERSISTENT": True, "FLATTENED": False},
    "flattened, descriptors": {"DESCRIPTORS": True, "PERSISTENT": True, "FLATTENED": True},
}
#: The GEMMs of `benchmarks.gemm_steps` that this is tried with.
NAMES = (
    "experts output, per tensor, fast accumulation",
    "experts output, rowwise",
    "experts output, blockwise",
)
#: How the operands of those GEMMs are scaled.
KINDS = (
    (Granularity.TENSOR_WISE, Granularity.TENSOR_WISE),
    (Granularity.ROW_WISE, Granularity.ROW_WISE),
    (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128),
)


@triton.jit
def product_by_descriptors(
    whole_a, whole_b, g, row, column, factors_a, factors_b, k, step_a, step_b,
    KIND_A: tl.constexpr, IMPRECISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`product` of blocks that TMA copies: 1x128 by 128x128, or no factors along k."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(tl.cdiv(k, BLOCK_K)):
        a = whole_a.load([row, block * BLOCK_K])
        b = whole_b.load([g, column, block * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
        if KIND_A <= LINE:
            total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
        else:
            tl.static_assert(KIND_A == BLOCK_1D)
            factor = tl.load(factors_a) * tl.load(factors_b)
            total += tl.dot(a, b) * factor[:, None]
            factors_a += step_a
            factors_b += step_b
    return total


@triton.jit
def one_tile(
    a, b, whole_a, whole_b, scale_inv_a, scale_inv_b, bias, out, n, k, depth, num_groups, group, row, end, column,
    stride_a, stride_b_group, stride_b,
    scale_a_group, scale_a_line, scale_a_block, scale_b_group, scale_b_line, scale_b_block,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, IMPRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """What `grouped_rows_kernel` does with a tile, of products along `depth`.

    Rows from `end` on are those of other groups: read, not stored."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    lines_a = tl.maximum(tl.minimum(rows, end - 1), 0)  # a flattened loop has tiles of no rows
    lines_b = columns % n
    is_group = group < num_groups
    group = tl.where(is_group, group, 0)
    g = group.to(tl.int64)
    factors_a = line_factors(scale_inv_a + g * scale_a_group, lines_a, row, scale_a_line, KIND_A)
    factors_b = line_factors(scale_inv_b + g * scale_b_group, lines_b, column, scale_b_line, KIND_B)
    if DESCRIPTORS:
        total = product_by_descriptors(
            whole_a, whole_b, group, row, column, factors_a, factors_b, depth, scale_a_block, scale_b_block,
            KIND_A, IMPRECISE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        offsets_k = tl.arange(0, BLOCK_K)
        pointers_a = a + lines_a.to(tl.int64)[:, None] * stride_a + offsets_k[None, :]
        pointers_b = b + g * stride_b_group + offsets_k[:, None] + lines_b.to(tl.int64)[None, :] * stride_b
        total = product(
            pointers_a, pointers_b, factors_a, factors_b, depth, scale_a_block, scale_b_block,
            KIND_A, KIND_B, EVEN_K, IMPRECISE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    total = finished(total, factors_a, factors_b, bias + g * n, lines_b, KIND_A, KIND_B, HAS_BIAS)
    total = tl.where(is_group, total, 0.0)
    pointers = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (columns < n)[None, :])


@triton.jit
def variant_kernel(
    a, b, scale_inv_a, scale_inv_b, offs, bias, out, num_rows, n, k, num_groups, tiles_m,
    stride_a, stride_b_group, stride_b,
    scale_a_group, scale_a_line, scale_a_block, scale_b_group, scale_b_line, scale_b_block,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, IMPRECISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PERSISTENT: tl.constexpr, FLATTENED: tl.constexpr,
):  # fmt: skip
    """`grouped_rows_kernel`, its operands behind descriptors or pointers, with one tile per program or a loop over them."""
    whole_a, whole_b = a, b
    if DESCRIPTORS:
        # Behind the last row TMA reads zeros.
        whole_a = tl.make_tensor_descriptor(a, [num_rows, k], [stride_a, 1], [BLOCK_M, BLOCK_K])
        whole_b = tl.make_tensor_descriptor(b, [num_groups, n, k], [stride_b_group, stride_b, 1], [1, BLOCK_N, BLOCK_K])
    first, step, last = tl.program_id(0), 1, tl.program_id(0) + 1
    if PERSISTENT:
        step, last = tl.num_programs(0), tiles_m * tl.cdiv(n, BLOCK_N)
    for tile in tl.range(first, last, step, flatten=FLATTENED):
        tile_m, tile_n = tile_of_band(tile, tiles_m, tl.cdiv(n, BLOCK_N), BAND)
        group, row, end = tile_in_group(offs, num_groups, num_rows, tile_m, BLOCK_M, BLOCK_E)
        # Triton flattens no loop whose inner one has a length that depends on the tile.
        if FLATTENED:
            one_tile(
                a, b, whole_a, whole_b, scale_inv_a, scale_inv_b, bias, out, n, k, k, num_groups, group, row, end,
                tile_n * BLOCK_N, stride_a, stride_b_group, stride_b,
                scale_a_group, scale_a_line, scale_a_block, scale_b_group, scale_b_line, scale_b_block,
                KIND_A, KIND_B, HAS_BIAS, EVEN_K, IMPRECISE, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
            )  # fmt: skip
        elif row < end:
            depth = tl.where(group < num_groups, k, 0)
            one_tile(
                a, b, whole_a, whole_b, scale_inv_a, scale_inv_b, bias, out, n, k, depth, num_groups, group, row, end,
                tile_n * BLOCK_N, stride_a, stride_b_group, stride_b,
                scale_a_group, scale_a_line, scale_a_block, scale_b_group, scale_b_line, scale_b_block,
                KIND_A, KIND_B, HAS_BIAS, EVEN_K, IMPRECISE, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
            )  # fmt: skip


def compare() -> None:
    """Raises where a variant's small products are not the kernel's, bit for bit. Needs TRITON_INTERPRET=1."""
    from tests.support.interpreter import exact_interpreter

    with exact_interpreter():
        _compare()


def _compare() -> None:
    rows, k, n, ends = 300, 256, 192, torch.tensor([70, 70, 220], dtype=torch.int32)  # 80 rows of no group
    for kind_a, kind_b in KINDS:
        a, b = torch.randn(rows, k).to(E4M3), torch.randn(len(ends), n, k).to(E4M3).mT
        scales = [torch.rand_like(scale) + 0.5 for scale in (factors_of(kind_a, rows, k), factors_of(kind_b, n, k, len(ends)))]
        kinds: dict[str, Any] = {"granularity_a": kind_a.value, "granularity_b": kind_b.value}
        given = GroupedGemm(a, b, *scales, ends, **kinds, fast_accum=kind_a is Granularity.TENSOR_WISE)
        expected = gemm.scaled_grouped_mm(given)
        for name, flags in VARIANTS.items():
            with mock.patch.object(gemm, "grouped_rows_kernel", _Variant(flags)):
                assert torch.equal(gemm.scaled_grouped_mm(given), expected), f"{kind_a.value}; {name}"


class _Variant:
    """Launches a variant in the place of the kernel, a persistent one with three programs."""

    def __init__(self, flags: dict[str, bool]) -> None:
        self.flags = flags

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(variant_kernel[(3,) if self.flags["PERSISTENT"] else grid], **self.flags)


def _row(name: str, launch: Launch, checks: list[str]) -> dict[str, Any]:
    compiled = compile_launch(launch, 90)
    ptx, cubin = compiled.asm["ptx"], read_cubin(compiled.asm["cubin"])
    row = row_of(name, launch, checks)
    if launch.arguments.get("FLATTENED"):
        row |= dict.fromkeys(("issue clocks", "waits", "share of the tensor cores"))
    return row | {
        "shared KB": compiled.metadata.shared / 1024,
        "SASS": cubin.instructions,
        "stack": cubin.stack,
        "TMA copies": ptx.count("cp.async.bulk.tensor"),
        "other copies": ptx.count("cp.async.cg"),
        "scratch B / program": compiled.metadata.global_scratch_size,
    }


def _rows(quick: bool, checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    if not quick:
        code, environment = "from benchmarks import descriptor_steps as d; d.compare()", os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=False)
        require(done.returncode == 0, "in Triton's interpreter each variant computes what the kernel computes", checks)
    for name in NAMES[:1] if quick else NAMES:
        launch = GEMMS[name]()[-1]
        variants = {f"{name}; {variant}": flags for variant, flags in VARIANTS.items()}
        cases = {name: launch} | {
            what: launch._replace(kernel=variant_kernel, arguments=launch.arguments | flags) for what, flags in variants.items()
        }
        for what, case in cases.items():
            row = attempts(what, functools.partial(_row, what, case, checks))
            if row is not None:
                yield row


def run(quick: bool) -> Result:
    """`quick`: one GEMM, nothing computed."""
    checks: list[str] = []
    attempts = Attempts()
    notes = ["estimates from cubins, per step along K; nothing was timed, and the variants have run in the interpreter only"]
    return Result(_rows(quick, checks, attempts), "the tensor cores' rate", checks, attempts, notes, where())


if __name__ == "__main__":
    main("descriptor_steps", run)
