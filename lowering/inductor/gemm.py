"""Lowering of scaled_mm: on CUDA torch's scaled GEMM as an extern kernel of Inductor's, where the hardware's rules
are met.

Not through Inductor's lowering of aten._scaled_mm: that one times Triton templates at compile time even without
max-autotune, and does not take scalar scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.kernel.mm import aten__fp8_mm
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.select_algorithm import realize_inputs
from torch._inductor.virtualized import V

from lowering.formats import FP8_MAX, Granularity
from lowering.hardware import Gemm, refusal, size_multiples
from lowering.inductor.buffers import as_it_is
from lowering.products import LineProduct

#: Of what cuBLASLt reads.
ALIGNMENT_BYTES = 16


def lower_scaled_mm(*operands: Any, **options: Any) -> Any:
    """aten._scaled_mm if it is legal; else our op, which copies operands into a legal form."""
    given: Any = LineProduct(*operands, **options)
    if is_legal(given.a, given.b, given.bias, given.out_dtype):
        layout, a, b, addends = laid_out(given.a, given.b, given.bias, given.out_dtype)
        inputs = [a, b, *realize_inputs(given.scale_inv_a, given.scale_inv_b), *addends]
        return aten__fp8_mm.bind(inputs, layout, out_dtype=given.out_dtype, use_fast_accum=given.fast_accum).output_node()
    return as_it_is(torch.ops.lowering.scaled_mm.default)(*operands, **options)


def is_legal(
    a: ir.TensorBox,
    b: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    granularity: Granularity = Granularity.TENSOR_WISE,
) -> bool:
    """Whether torch's GEMM takes this, whatever symbolic sizes turn out to be; `laid_out` sees to the strides."""
    known = V.graph.sizevars
    (m, k), n = a.get_size(), b.get_size()[1]
    empty = {name: 0 for name, size in (("m", m), ("n", n), ("k", k)) if known.statically_known_equals(size, 0)}
    bias_dtype = None if bias is None else bias.get_dtype()
    gemm = Gemm(a.get_dtype(), b.get_dtype(), granularity, granularity, out_dtype, bias_dtype, **empty)
    multiples = zip((m, n, k), size_multiples(gemm), strict=True)
    is_aligned = all(multiple == 1 or known.statically_known_multiple_of(size, multiple) for size, multiple in multiples)
    return is_aligned and refusal(gemm, a.get_device()) is None


def laid_out(
    a: ir.TensorBox, b: ir.TensorBox, bias: ir.TensorBox | None, out_dtype: torch.dtype, *, without_gaps: bool = False
) -> tuple[ir.Layout, Any, Any, list[Any]]:
    """The layout of the output, and the operands as cuBLASLt reads them: a row-major, b column-major, rows and addresses of
    whole 16 bytes, the bias dense. What comes otherwise is copied; what Inductor has yet to lay out gets these strides.
    without_gaps: lines along K begin where the ones before them end."""
    _, _, _, layout, a, b = mm_args(a, b, out_dtype=out_dtype)
    addends = [] if bias is None else [_with_strides(realize_inputs(bias), [0])]
    return layout, _with_strides(a, [1, 0], without_gaps), _with_strides(b, [0, 1], without_gaps), addends


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
    """Whether every row begins at a multiple of 16 bytes, and a vector has no gaps."""
    layout, itemsize = x.get_layout(), x.get_dtype().itemsize
    *rows, inner = sorted(layout.stride, key=lambda stride: stride == 1)
    starts = (layout.offset, *rows)
    known = V.graph.sizevars
    is_dense = known.statically_known_equals(inner, 1) or known.statically_known_equals(layout.size[-1], 1)
    # Inductor takes results of operations with an unaligned argument, such as a scale, for unaligned. Ours are new tensors.
    is_ours = x.get_dtype() in FP8_MAX and x.get_name() not in V.graph.graph_inputs
    is_base_aligned = is_ours or x.get_name() not in V.graph.unaligned_buffers
    multiples = all(known.statically_known_multiple_of(start * itemsize, ALIGNMENT_BYTES) for start in starts)
    return is_base_aligned and is_dense and multiples
