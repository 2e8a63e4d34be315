"""The lowering of scaled_mm.

On CUDA torch's scaled GEMM is an extern kernel of Inductor's, where the hardware's rules are met. Not through Inductor's
lowering of aten._scaled_mm: that one times Triton templates at compile time even without max-autotune, and does not take scalar
scales.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.kernel.mm import aten__fp8_mm
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.lowering import lowerings
from torch._inductor.select_algorithm import realize_inputs
from torch._inductor.virtualized import V, ops

from lowering.formats import FP8_MAX, SCALE_ALIGNMENT, Granularity
from lowering.hardware import Gemm, needs_dense_rows, refusal, rows_refusal, size_multiples
from lowering.inductor import buffers
from lowering.products import Product
from lowering.trials import ALIGNMENT_BYTES

lowering_ops = torch.ops.lowering


def lower_scaled_mm(*operands: Any, implementation: str = "auto", **options: Any) -> Any:
    """aten._scaled_mm, with the scales of rows, or with a scale of 1 and generated code behind it (NOTE [scales after the
    GEMM]); where neither is legal, and with scales of blocks, our op."""
    given: Any = Product(*operands, **options)
    call = functools.partial(buffers.call_operation(lowering_ops.scaled_mm.default), *operands, **options)
    if given.granularities[0].block is not None:
        return call(implementation=implementation)
    if not (given.scale_inv_a.get_size() or given.scale_inv_b.get_size()):
        return _tensorwise_mm(given)
    device, rows = given.a.get_device(), Granularity.ROW_WISE
    gemm = Gemm(given.a.get_dtype(), given.b.get_dtype(), rows, rows, given.out_dtype)
    if rows_refusal(gemm, device, given.fast_accum) is None and _is_legal(given, rows):
        of_a = _per_line(given.scale_inv_a, given.a.get_size()[0])
        of_b = lowerings[torch.ops.aten.permute.default](_per_line(given.scale_inv_b, given.b.get_size()[1]), [1, 0])
        return _torch_gemm(given, of_a, of_b, without_gaps=needs_dense_rows(device))
    if _is_legal(dataclasses.replace(given, bias=None, out_dtype=torch.float32)):
        return _scaled_afterwards(given)
    return call()


def _scaled_afterwards(given: Any) -> ir.TensorBox:
    """The per-tensor GEMM with scale 1 into float32; its scales, the bias and the rounding join the code that reads it."""
    one = buffers.one(given.a.get_device())
    plain = dataclasses.replace(given, scale_inv_a=one, scale_inv_b=one, bias=None, out_dtype=torch.float32)
    out = _tensorwise_mm(plain)
    load, (m, n) = out.make_loader(), out.get_size()
    scales_a, scales_b = (scale_inv.make_loader() for scale_inv in (given.scale_inv_a, given.scale_inv_b))
    of_row = (lambda row: scales_a([row, 0])) if given.scale_inv_a.get_size() else (lambda row: scales_a([]))
    of_col = (lambda col: scales_b([col, 0])) if given.scale_inv_b.get_size() else (lambda col: scales_b([]))
    bias = None if given.bias is None else given.bias.make_loader()

    def scaled(index: Any) -> Any:
        row, col = index
        value = ops.mul(ops.mul(load(index), of_row(row)), of_col(col))
        if bias is not None:
            value = ops.add(value, ops.to_dtype(bias([col]), torch.float32))
        return ops.to_dtype(value, given.out_dtype)

    return ir.TensorBox.create(buffers.pointwise(given.a.get_device(), given.out_dtype, scaled, [m, n]))


def _per_line(scale_inv: ir.TensorBox, lines: Any) -> ir.TensorBox:
    """The scales [lines, 1] in memory; a scalar is repeated."""
    if scale_inv.get_size():
        return scale_inv
    scale_inv.realize()
    load = scale_inv.make_loader()
    loops = buffers.pointwise(scale_inv.get_device(), torch.float32, lambda index: load([]), [lines, 1])
    return ir.TensorBox(buffers.realize_ordered(loops, [1, 1]))


def _tensorwise_mm(given: Any) -> Any:
    """aten._scaled_mm with scalar scales if it is legal; else our op, which copies operands into a legal form."""
    if _is_legal(given):
        return _torch_gemm(given, given.scale_inv_a, given.scale_inv_b)
    how = {"out_dtype": given.out_dtype, "fast_accum": given.fast_accum}
    return buffers.call_operation(lowering_ops.scaled_mm.default)(*given.operands, **how)


def _torch_gemm(given: Any, scale_a: ir.TensorBox, scale_b: ir.TensorBox, without_gaps: bool = False) -> Any:
    """aten._scaled_mm of a legal product, with its scales as torch takes them, and the operands as cuBLASLt reads them: a
    row-major, b column-major, rows and all addresses, those of scales too, of whole 16 bytes, the bias dense. What comes
    otherwise is copied; what Inductor has yet to lay out gets these strides. without_gaps: lines along K begin where the ones
    before them end."""
    _, _, _, layout, a, b = mm_args(given.a, given.b, out_dtype=given.out_dtype)
    addends = [] if given.bias is None else [_with_strides(realize_inputs(given.bias), [0])]
    operands = _with_strides(a, [1, 0], without_gaps), _with_strides(b, [0, 1], without_gaps)
    inputs = [*operands, *map(_aligned_scale, (scale_a, scale_b)), *addends]
    return aten__fp8_mm.bind(inputs, layout, out_dtype=given.out_dtype, use_fast_accum=given.fast_accum).output_node()


def _is_legal(given: Any, granularity: Granularity = Granularity.TENSOR_WISE) -> bool:
    """True if torch's GEMM takes this, for all values of symbolic sizes; `_torch_gemm` makes the strides right."""
    known = V.graph.sizevars
    (m, k), n = given.a.get_size(), given.b.get_size()[1]
    empty = {name: 0 for name, size in (("m", m), ("n", n), ("k", k)) if known.statically_known_equals(size, 0)}
    bias_dtype = None if given.bias is None else given.bias.get_dtype()
    gemm = Gemm(given.a.get_dtype(), given.b.get_dtype(), granularity, granularity, given.out_dtype, bias_dtype, **empty)
    multiples = zip((m, n, k), size_multiples(gemm), strict=True)
    is_aligned = all(multiple == 1 or known.statically_known_multiple_of(size, multiple) for size, multiple in multiples)
    return is_aligned and refusal(gemm, given.a.get_device()) is None


def _aligned_scale(scale_inv: ir.TensorBox) -> Any:
    """Scales that begin at a multiple of 16 bytes: cuBLAS 13 refuses any others. Elements of a vector are read from one copy of
    it, whose elements are 16 bytes apart."""
    x = realize_inputs(scale_inv)
    if _begins_aligned(x):
        return x
    is_element = isinstance(x, ir.ReinterpretView) and not x.get_size()
    spread = buffers.spread_out(x, SCALE_ALIGNMENT) if is_element else None
    if spread is None:
        return ir.ExternKernel.copy_input(x)
    layout = x.get_layout()
    return ir.ReinterpretView(
        data=spread, layout=ir.FixedLayout(layout.device, layout.dtype, [], [], SCALE_ALIGNMENT * layout.offset)
    )


def _with_strides(x: Any, order: list[int], without_gaps: bool = False) -> ir.IRNode:
    x = ir.ExternKernel.require_stride_order(x, order)
    if without_gaps:
        x = ir.ExternKernel.require_exact_strides(x, _packed(x.get_size(), order))
    return x if _is_aligned(x) else ir.ExternKernel.require_stride_order(ir.ExternKernel.copy_input(x), order)


def _packed(size: Any, order: list[int]) -> list[Any]:
    """The strides without gaps of a matrix whose dimension of order 0 is the innermost one."""
    inner = order.index(0)
    return [1 if d == inner else size[inner] for d in range(2)]


def _is_aligned(x: ir.IRNode) -> bool:
    """True if every row begins at a multiple of 16 bytes, and a vector has no gaps."""
    layout = x.get_layout()
    *rows, inner = sorted(layout.stride, key=lambda stride: stride == 1)
    known = V.graph.sizevars
    is_dense = known.statically_known_equals(inner, 1) or known.statically_known_equals(layout.size[-1], 1)
    return _begins_aligned(x) and is_dense and all(_is_whole(stride, x) for stride in rows)


def _begins_aligned(x: ir.IRNode) -> bool:
    """True if x begins at a multiple of 16 bytes."""
    # Inductor takes results of operations with an unaligned argument, such as a scale, for unaligned. Ours are new tensors.
    is_ours = x.get_dtype() in FP8_MAX and x.get_name() not in V.graph.graph_inputs
    return (is_ours or x.get_name() not in V.graph.unaligned_buffers) and _is_whole(x.get_layout().offset, x)


def _is_whole(count: Any, x: ir.IRNode) -> bool:
    """True if so many elements of x take a multiple of 16 bytes."""
    return bool(V.graph.sizevars.statically_known_multiple_of(count * x.get_dtype().itemsize, ALIGNMENT_BYTES))


LOWERINGS = {lowering_ops.scaled_mm.default: lower_scaled_mm}
