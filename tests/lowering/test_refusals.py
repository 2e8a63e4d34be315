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
mx_cast = functools.partial(ops.cast_with_scales, granularity="block_1x32")
mx_ready = functools.partial(lowering.gemm_ready, granularity="block_1x32")
statistics = ops.quantization_statistics


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


def history(length: int) -> tuple[torch.Tensor, ...]:
    return torch.rand(length, 6), torch.ones(6), torch.full((6,), 448.0)


def of_tensors(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
    return lowering.scaled_mm(*operands[:2], SCALE, SCALE, *operands[2:], **options)


LINES = torch.ones(4, 1), torch.ones(6, 1)


def of_rows(*bias: torch.Tensor, dtypes=(E4M3, E4M3), scales=LINES, **options: Any) -> torch.Tensor:
    a, b = fp8(4, 5, dtype=dtypes[0]), fp8(6, 5, dtype=dtypes[1])
    return ops.scaled_mm(a, b.t(), *scales, *bias, **both("row_wise"), **options)


def of_blocks(*, kinds=(ONE, TWO), a=None, scale=None, bias=None, **options: Any) -> torch.Tensor:
    q_a, scale_a = lowering.cast_blockwise(torch.ones(130, 300), E4M3, granularity=kinds[0])
    q_b, scale_b = lowering.cast_blockwise(torch.ones(200, 300), E4M3, granularity=kinds[1])
    given = q_a if a is None else a, q_b.t(), scale_a if scale is None else scale, scale_b, bias
    return lowering.scaled_mm(*given, granularity_a=kinds[0], granularity_b=kinds[1], **options)


def of_compact(scale_b=None, outer: int = 260, inner: int = 400, **options: Any) -> torch.Tensor:
    """With the results of `quantize_blockwise`, the second's scales as they are, or others."""
    a, scale_a = lowering.quantize_blockwise(torch.ones(8, inner), E4M3, ONE.block)
    b, own = lowering.quantize_blockwise(torch.ones(outer, inner), E4M3, (TWO if outer > 128 else ONE).block)
    return lowering.scaled_mm(a, b.t(), scale_a, own if scale_b is None else scale_b, **options)


MX, MX_SCALE = mx_cast([X], E4M3)
CODES = torch.zeros(4, 2, dtype=torch.uint8)


def of_mx(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
    return lowering.scaled_mm(*operands, **both("block_1x32"), **options)


ROWS, EXPERTS, OFFS = fp8(8, 16), fp8(2, 16, 32), torch.tensor([3, 8], dtype=torch.int32)
A_SCALE = torch.ones(())


def grouped(*arguments: Any, a=ROWS, b=EXPERTS, scales=(A_SCALE, A_SCALE), kinds=None, **options: Any) -> torch.Tensor:
    named = dict(zip(("granularity_a", "granularity_b"), kinds or (), strict=False))
    return lowering.scaled_grouped_mm(a, b, *scales, *arguments, **named, **options)


columns = functools.partial(ops.cast_columns, dtype=E4M3, offs=OFFS)
BLOCKS, SQUARES = ("block_1x128", "block_128x128"), ("block_128x128", "block_1x128")

QUANTIZING = [
    (lambda: lowering.amax(torch.zeros(3, dtype=torch.float64)), "float64"),
    (lambda: lowering.amax(torch.zeros(3, dtype=torch.int32)), "int32"),
    (lambda: lowering.scale_from_amax(SCALE, torch.float16), "not an FP8 dtype"),
    (lambda: ops.scales_from_amax(SCALE, E4M3, inverse="divide", margin=1), "pass margin=0"),
    (lambda: lowering.quantize(X, SCALE, torch.uint8), "not an FP8 dtype"),
    (lambda: lowering.quantize(X.double(), SCALE, E4M3), "float64"),
    (lambda: lowering.quantize(X, torch.ones(3), E4M3), "one float32 value"),
    (lambda: lowering.quantize(X, SCALE.double(), E4M3), "one float32 value"),
    (lambda: lowering.cast_transpose_amax(torch.zeros(2, 3, 4), SCALE, E4M3), "reshape it to two dimensions"),
    (lambda: lowering.cast_transpose_amax(X, SCALE, torch.float32), "not an FP8 dtype"),
    *((lambda quantize=quantize: quantize(X.double(), E4M3), "float64.*convert it to") for quantize in (
        lowering.quantize_rowwise, lowering.quantize_mxfp8, functools.partial(lowering.quantize_blockwise, block=(1, 128)))),
    *((lambda quantize=quantize: quantize(X, torch.float16), "not an FP8 dtype") for quantize in (
        lowering.quantize_rowwise, lowering.quantize_mxfp8, functools.partial(lowering.quantize_blockwise, block=(1, 128)))),
    *((lambda quantize=quantize: quantize(torch.ones(()), E4M3), r"no dimensions.*reshape it to \(1,\)") for quantize in (
        lowering.quantize_rowwise, lowering.quantize_mxfp8, functools.partial(lowering.quantize_blockwise, block=(1, 128)))),
    *((lambda block=block: lowering.quantize_blockwise(WIDE, E4M3, block), r"block is \(?\d+.*use \(1, 128\) or \(128, 128\)")
      for block in [(128, 1), (1, 64), (128,), (64, 64), 128]),
    # Casts.
    (lambda: lowering.cast_blockwise(WIDE, E4M3, granularity=Granularity.TENSOR_WISE),
     r"granularity is 'tensor_wise'; use 'block_1x128' or 'block_128x128'"),
    (lambda: lowering.cast_transpose_blockwise(torch.ones(2, 2, 128), E4M3, granularity=ONE), r"\(2, 2, 128\); flatten"),
    (lambda: cast([torch.ones(2, 3, 4, 5)], E4M3), "reshape it to two dimensions"),
    (lambda: cast([torch.ones(2)], E4M3, columnwise=True), "reshape it to two dimensions"),
    (lambda: cast([X], E4M3, inverse="multiply"), "with power_of_2=False"),
    (lambda: cast([X], E4M3, power_of_2=False, inverse="by"), "one of 'multiply', 'divide'"),
    (lambda: ops.amax_rowwise([X], rowwise=False, columnwise=False), "ask for a copy"),
    (lambda: ops.cast_lines_rowwise([X], torch.ones(2), E4M3, rowwise=True, columnwise=True), "these matrices have 68 lines"),
    (lambda: mx_cast([X[0]], E4M3), r"x has shape \(64,\); flatten"),
    *((lambda given=given, options=options: ops.cast([given[0]], [given[1]], given[2], **options), message)
      for given, message in (
          ((X.double(), SCALE, E4M3), "float64"),
          ((X[0], SCALE, E4M3), "matrix"),
          ((X, torch.ones(2), E4M3), "scale"),
          ((X, SCALE.double(), E4M3), "scale"),
          ((X, SCALE, torch.float16), "not an FP8 dtype"),
      ) for options in ({}, {"columnwise": True}, {"with_amax": True})),
    *((lambda given=given: ops.cast([X] * given[0], given[1], E4M3, **given[2]), message) for given, message in (
        ((2, [SCALE] * 3, {}), "2 matrices need as many scales, got 3"),
        ((2, [SCALE], {}), "2 matrices need as many scales, got 1"),
        ((2, [SCALE, torch.ones(2)], {}), "scale"),
        ((0, [], {}), "pass a matrix and ask for a copy"),
        ((1, [SCALE], {"rowwise": False}), "pass a matrix and ask for a copy"),
        ((2, [SCALE] * 2, {"with_amax": True, "in_parts": True}), "which is for one matrix"),
        ((1, [SCALE], {"in_parts": True}), "with_amax=True"),
    )),
    (lambda: ops.cast([torch.zeros(0, 2, 2)], [SCALE], E4M3), "batch of matrices.*E at least 1"),
    (lambda: ops.cast([torch.zeros(2, 4, 4)], [torch.ones(3)], E4M3), "one for each of the 2"),
    (lambda: ops.transposed_copy(ROWS, OFFS, torch.zeros(8)), "index is torch.float32"),
    (lambda: ops.transposed_copy(ROWS, OFFS, align=12), "power of two"),
    (lambda: columns(X.double(), granularity="block_1x128"), "float64"),
    (lambda: columns(X, granularity="block_128x128"), "rows of two groups"),
    (lambda: columns(X, granularity="tensor_wise"), "transposed_copy"),
    (lambda: columns(X, granularity="row_wise", rowwise=True), "rowwise is True and"),
    (lambda: columns(X, index=torch.zeros(8).int(), granularity="block_1x128", rowwise=True), "a cast of its own"),
    # Copies that travel, and that are saved.
    (lambda: lowering.gemm_ready(WIDE.to(E4M3), torch.ones(4, 1), granularity=ONE, columnwise=True),
     r"compact scales of this copy are float32 \(1, 128\)"),
    (lambda: mx_ready(MX, CODES.float()), "scale_inv is torch.float32"),
    (lambda: mx_ready(MX, CODES[:3]), r"\(3, 2\), compact scales of this copy are uint8 \(4, 2\)"),
    (lambda: mx_ready(MX, CODES, square=True), r"uint8 \(1, 2\)"),
    (lambda: ops.scale_values_mxfp8(MX, CODES), r"scale is torch\.uint8 \(4, 2\).*expected contiguous"),
    (lambda: ops.save_activation(torch.zeros(2, 2, dtype=torch.int64)), "int64"),
    (lambda: ops.load_activation(fp8(2, 200), torch.ones(2, 1), dtype=torch.float32), r"\[2, 1\]"),
    (lambda: ops.load_activation(fp8(2, 200), torch.ones(2, 2), dtype=torch.int8), "int8"),
    # The state, and statistics.
    (lambda: lowering.update_scales(*history(4), algo="mean"), "'max' or 'most_recent'"),
    (lambda: lowering.update_scales(torch.rand(4), torch.ones(4), torch.ones(4)), r"len >= 1.*\(4,\)"),
    (lambda: lowering.update_scales(torch.rand(0, 6), torch.ones(6), torch.ones(6)), r"len >= 1.*\(0, 6\)"),
    (lambda: lowering.update_scales(torch.rand(4, 6), torch.ones(5), torch.ones(6)), r"scale must be.*\[6\].*\[5\]"),
    (lambda: lowering.update_scales(torch.rand(4, 6), torch.ones(6), torch.ones(6).half()), "fp8_max must be"),
    (lambda: lowering.update_scales(*history(2), num_non_finite=torch.zeros(6)), "num_non_finite must be torch.int32"),
    (lambda: statistics(X, E4M3, granularity="tensor_wise"), "takes scale and scale_inv"),
    (lambda: statistics(X, E4M3, SCALE, SCALE, granularity="row_wise"), "computes its own scales"),
    (lambda: statistics(X, E4M3, SCALE, SCALE, granularity="tensor_wise", columnwise=True), "request one copy"),
    (lambda: statistics(X, E4M3, granularity="row_wise", rowwise=False), "request a copy"),
    (lambda: statistics(X[0], E4M3, SCALE, SCALE, granularity="tensor_wise"), r"shape \(64,\)"),
]  # fmt: skip

PRODUCTS = [
    (lambda: of_tensors(fp8(4, 5), fp8(6, 4)), r"cannot multiply \(4, 5\) by \(6, 4\)"),
    (lambda: of_tensors(fp8(4, 4), torch.zeros(4, 4)), "quantize both operands"),
    (lambda: of_tensors(fp8(4, 4), fp8(4, 4), torch.zeros(3)), r"bias has shape \(3,\)"),
    (lambda: of_tensors(fp8(4, 4), fp8(4, 4), out_dtype=E4M3), "out_dtype is"),
    (lambda: of_tensors(*[fp8(4, 4, dtype=E5M2)] * 2), "one operand to E4M3"),
    (lambda: of_rows(scales=(torch.ones(4), torch.ones(6, 1))), r"pass float32 \(4, 1\)"),
    (lambda: of_rows(scales=(torch.ones(()), torch.ones(1, 6))), r"pass float32 \(6, 1\)"),
    (lambda: of_rows(dtypes=(E5M2, E5M2)), "one operand to E4M3"),
    (lambda: of_rows(torch.ones(4)), r"pass one of shape \(6,\)"),
    (lambda: of_rows(out_dtype=torch.uint8), "float output"),
    (lambda: of_blocks(kinds=(TWO, TWO)), "no FP8 GEMM takes 128x128 by 128x128 blocks; quantize one operand with 1x128"),
    (lambda: of_blocks(scale=torch.ones(130, 3)), r"scale_inv_a is .*\(130, 3\).*expected contiguous float32 \(3, 132\)"),
    (lambda: of_blocks(scale=torch.ones(132, 3).t()), r"\(3, 132\) with strides \(1, 3\)"),
    (lambda: of_blocks(a=fp8(130, 16)), "do not multiply"),
    (lambda: of_blocks(out_dtype=torch.float64), r"out_dtype is torch\.float64"),
    (lambda: of_blocks(bias=torch.ones(1)), r"bias has shape \(1,\)"),
    (lambda: of_blocks(implementation="fast"), "implementation is 'fast'; use one of auto"),
    (lambda: of_blocks(implementation="triton"), "needs CUDA tensors, a is on cpu"),
    (lambda: of_blocks(implementation="cublaslt"), r"cuBLASLt cannot compute .* a is on cpu"),
    (lambda: of_compact(), r"scale_inv_b has shape .*transpose it with \.t\(\)"),
    (lambda: of_compact(torch.tensor(1.0)), r"scale_inv_b has shape \(\).*pass the result of quantize_blockwise"),
    (lambda: of_compact(lowering.quantize_blockwise(torch.ones(260, 400), E4M3, TWO.block)[1].t(), fast_accum=True),
     "fast_accum is True"),
    (lambda: of_compact(outer=300, inner=300), r"square shape \(3, 3\).*with \.t\(\)"),
    (lambda: of_compact(outer=3, inner=300), r"square shape \(3, 3\).*with \.t\(\)"),
    (lambda: of_mx(MX, MX, MX_SCALE, MX_SCALE), "do not multiply"),
    (lambda: of_mx(MX, MX.t(), CODES, MX_SCALE), r"scale_inv_a is torch\.uint8 \(4, 2\).*expected contiguous"),
    (lambda: of_mx(MX, MX.t(), MX_SCALE, MX_SCALE.view(torch.float8_e8m0fnu)), "scale_inv_b is torch.float8_e8m0"),
    (lambda: of_mx(MX, MX.t(), MX_SCALE, MX_SCALE, torch.ones(3)), r"bias has shape \(3,\)"),
    (lambda: of_mx(MX, MX.t(), MX_SCALE, MX_SCALE, out_dtype=E4M3), "out_dtype is"),
    # Grouped.
    (lambda: grouped(), "offs is None"),
    (lambda: grouped(OFFS.long()), "int32"),
    (lambda: grouped(OFFS[:1]), "1 groups and b 2 matrices"),
    (lambda: grouped(OFFS, a=EXPERTS, b=EXPERTS.mT), "offs=None"),
    (lambda: grouped(OFFS, a=ROWS.float()), "quantize both operands"),
    (lambda: grouped(OFFS, a=ROWS.to(E5M2), b=EXPERTS.to(E5M2)), "two E5M2 operands"),
    (lambda: grouped(OFFS, b=EXPERTS[:, :8]), "make no grouped GEMM"),
    (lambda: grouped(OFFS, scales=(A_SCALE, torch.ones(3))), r"scale_inv_b is torch.float32 \(3,\)"),
    (lambda: grouped(OFFS, torch.ones(32)), "bias has shape"),
    (lambda: grouped(OFFS, kinds=["block_1x128"]), "1x128 by tensor-wise"),
    (lambda: grouped(OFFS, kinds=["rows"]), "use 'tensor_wise' or"),
    (lambda: grouped(OFFS, scales=(torch.ones(8, 1), torch.ones(2, 1, 1)), kinds=BLOCKS, fast_accum=True), "fast_accum"),
    (lambda: grouped(OFFS, scales=(torch.ones(1, 8), torch.ones(2, 1, 1)), kinds=BLOCKS), r"scale_inv_a is .* \(1, 8\)"),
    (lambda: grouped(OFFS, scales=(torch.ones(1, 1), torch.ones(2, 32, 1)), kinds=SQUARES), "rows of two groups"),
    (lambda: grouped(OFFS, a=ROWS[:, :8].t(), b=ROWS), "8 tokens, not a multiple of 16"),
]  # fmt: skip


@each(("call", "message"), [*QUANTIZING, *PRODUCTS])
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
