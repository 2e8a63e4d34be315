"""What the operations refuse, with the value and the fix in the error: one table, by what is wrong."""

import functools
from typing import Any

import pytest
import torch

import lowering
from lowering.formats import E4M3, E5M2, Granularity
from tests.support.cases import each
from tests.support.copies import both

ops = torch.ops.lowering
ONE, TWO = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128
SCALE = torch.tensor(3.0)
X, WIDE = torch.ones(4, 64), torch.ones(4, 128)

cast = functools.partial(ops.cast_with_scales, granularity="row_wise")
statistics = ops.quantization_statistics


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(E4M3)


def of_blocks(*, kinds=(ONE, TWO), power_of_2=True, **options: Any) -> torch.Tensor:
    (q_a, scale_a), (q_b, scale_b) = (
        lowering.cast_blockwise(torch.full((rows, 300), 3.0), E4M3, granularity=kind, power_of_2=power_of_2)
        for rows, kind in zip((130, 200), kinds, strict=True)
    )
    return lowering.scaled_mm(q_a, q_b.t(), scale_a, scale_b, granularity_a=kinds[0], granularity_b=kinds[1], **options)


def of_compact() -> torch.Tensor:
    """With the results of `quantize_blockwise`, the second's scales as they are."""
    a, scale_a = lowering.quantize_blockwise(torch.ones(8, 400), E4M3, ONE.block)
    b, scale_b = lowering.quantize_blockwise(torch.ones(260, 400), E4M3, TWO.block)
    return lowering.scaled_mm(a, b.t(), scale_a, scale_b)


ROWS, EXPERTS, OFFS = fp8(8, 16), fp8(2, 16, 32), torch.tensor([3, 8], dtype=torch.int32)


def grouped(*arguments: Any, a=ROWS, b=EXPERTS, scales=(SCALE, SCALE), kinds=(), **options: Any) -> torch.Tensor:
    named = dict(zip(("granularity_a", "granularity_b"), kinds, strict=False))
    return lowering.scaled_grouped_mm(a, b, *scales, *arguments, **named, **options)


columns = functools.partial(ops.cast_columns, dtype=E4M3, offs=OFFS)
QUANTIZE = lowering.quantize_rowwise, lowering.quantize_mxfp8, functools.partial(lowering.quantize_blockwise, block=(1, 128))
QUANTIZING = [
    (lambda: ops.scales_from_amax(SCALE, E4M3, inverse="divide", margin=1), "pass margin=0"),
    (lambda: lowering.quantize(X, torch.ones(3), E4M3), "one float32 value"),
    *((lambda quantize=quantize, given=given: quantize(*given), message) for quantize in QUANTIZE for given, message in (
        ((X.double(), E4M3), "float64.*convert it to"),
        ((X, torch.float16), "not an FP8 dtype"),
        ((torch.ones(()), E4M3), r"no dimensions.*reshape it to \(1,\)"),
    )),
    *((lambda block=block: lowering.quantize_blockwise(WIDE, E4M3, block), r"block is \(?\d+.*use \(1, 128\) or \(128, 128\)")
      for block in [(128, 1), 128]),
    # Casts.
    (lambda: lowering.amax(X.double()), "float64"),
    (lambda: lowering.cast_blockwise(WIDE, E4M3, granularity="tensor_wise"), "use 'block_1x128' or 'block_128x128'"),
    (lambda: lowering.cast_transpose_blockwise(WIDE[None], E4M3, granularity=ONE), r"\(1, 4, 128\); flatten"),
    (lambda: lowering.cast_transpose_amax(X[None], SCALE, E4M3), "reshape it to two dimensions"),
    (lambda: ops.amax_rowwise([X], rowwise=False, columnwise=False), "ask for a copy"),
    (lambda: ops.cast([torch.zeros(0, 2, 2)], [SCALE], E4M3), "batch of matrices.*E at least 1"),
    (lambda: ops.cast([torch.zeros(2, 4, 4)], [torch.ones(3)], E4M3), "one for each of the 2"),
    (lambda: ops.transposed_copy(ROWS, OFFS, torch.zeros(8)), "index is torch.float32"),
    (lambda: columns(X, granularity="tensor_wise"), "transposed_copy"),
    (lambda: columns(X, granularity="row_wise", rowwise=True), "rowwise is True and"),
    (lambda: cast([X], E4M3, inverse="multiply"), "with power_of_2=False"),
    (lambda: ops.cast_lines_rowwise([X], torch.ones(2), E4M3, rowwise=True, columnwise=True), "these matrices have 68 lines"),
    (lambda: ops.cast([X] * 2, [SCALE] * 3, E4M3), "2 matrices need as many scales, got 3"),
    (lambda: ops.cast([X], [SCALE], E4M3, rowwise=False), "pass a matrix and ask for a copy"),
    (lambda: ops.cast([X] * 2, [SCALE] * 2, E4M3, with_amax=True, in_parts=True), "which is for one matrix"),
    (lambda: ops.transposed_copy(ROWS, OFFS, align=12), "power of two"),
    (lambda: columns(X, index=torch.zeros(8).int(), granularity="block_1x128", rowwise=True), "a cast of its own"),
    # Copies that travel, and that are saved.
    (lambda: lowering.gemm_ready(WIDE.to(E4M3), torch.ones(4, 1), granularity=ONE, columnwise=True),
     r"compact scales of this copy are float32 \(1, 128\)"),
    (lambda: ops.load_activation(fp8(2, 200), torch.ones(2, 1), dtype=torch.float32), r"\[2, 1\]"),
    (lambda: ops.save_activation(OFFS[None]), "int32"),
    (lambda: ops.gemm_ready(X.to(E4M3), torch.ones(4, 2), granularity="block_1x32"), "scale_inv is torch.float32"),
    # The state, and statistics.
    (lambda: lowering.update_scales(X, torch.ones(5), torch.ones(64)), r"scale must be.*\[64\].*\[5\]"),
    (lambda: statistics(X, E4M3, granularity="tensor_wise"), "takes scale and scale_inv"),
    (lambda: lowering.update_scales(X.clone(), torch.ones(64), torch.ones(64), algo="mean"), "'max' or 'most_recent'"),
    (lambda: statistics(X, E4M3, SCALE, SCALE, granularity="tensor_wise", columnwise=True), "request one copy"),
]  # fmt: skip

PRODUCTS = [
    (lambda: lowering.scaled_mm(fp8(4, 5), fp8(6, 4), SCALE, SCALE), r"cannot multiply \(4, 5\) by \(6, 4\)"),
    (lambda: lowering.scaled_mm(ROWS, X[:, :16].t(), SCALE, SCALE), "quantize both operands"),
    (lambda: lowering.scaled_mm(ROWS.to(E5M2), ROWS.to(E5M2).t(), SCALE, SCALE), "one operand to E4M3"),
    (lambda: lowering.scaled_mm(ROWS, ROWS.t(), SCALE, SCALE, out_dtype=E4M3), "out_dtype is"),
    (lambda: of_blocks(implementation="fast"), "implementation is 'fast'; use one of auto"),
    (lambda: of_blocks(implementation="triton"), "needs CUDA tensors, a is on cpu"),
    (lambda: ops.scaled_mm(fp8(4, 5), fp8(6, 5).t(), X[:, 0], torch.ones(6, 1), **both("row_wise")), r"pass float32 \(4, 1\)"),
    (lambda: of_blocks(kinds=(TWO, TWO)), "no FP8 GEMM takes 128x128 by 128x128 blocks; quantize one operand with 1x128"),
    (lambda: of_blocks(implementation="cublaslt"), r"cuBLASLt cannot compute .* a is on cpu"),
    (lambda: of_compact(), r"scale_inv_b has shape .*transpose it with \.t\(\)"),
    (lambda: of_blocks(fast_accum=True), "fast_accum is True"),
    (lambda: of_blocks(kinds=(ONE, ONE), implementation="mxfp8", power_of_2=False), "no power of two.*with power_of_2=True"),
    # Grouped.
    (lambda: grouped(), "offs is None"),
    (lambda: grouped(OFFS, b=EXPERTS[:, :8]), "make no grouped GEMM"),
    (lambda: grouped(OFFS, scales=(SCALE, torch.ones(3))), r"scale_inv_b is torch.float32 \(3,\)"),
    (lambda: grouped(OFFS, scales=(torch.ones(8, 1), torch.ones(2, 1, 1)), kinds=(ONE, TWO), fast_accum=True), "fast_accum"),
    (lambda: grouped(OFFS, scales=(torch.ones(1, 1), torch.ones(2, 32, 1)), kinds=(TWO, ONE)), "rows of two groups"),
    (lambda: grouped(OFFS.long()), "int32"),
    (lambda: grouped(OFFS[:1]), "1 groups and b 2 matrices"),
    (lambda: grouped(OFFS, a=EXPERTS, b=EXPERTS.mT), "offs=None"),
    (lambda: grouped(OFFS, a=ROWS[:, :8].t(), b=ROWS), "8 tokens, not a multiple of 16"),
]  # fmt: skip


@each(("call", "message"), [*QUANTIZING, *PRODUCTS])
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
