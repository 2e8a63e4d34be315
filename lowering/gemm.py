"""The FP8 GEMM of two matrices: its specification, and the choice of what computes it, by the kind of its scales.

NOTE [one decision] Checks, refusals, trials and what a library is told depend on shapes, strides, dtypes, alignment, device and
options alone. They are looked at once for each combination of these, and give a function of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lowering import products
from lowering.blockwise import gemm as blocks_gemm
from lowering.blockwise import reference as blocks
from lowering.checks import check_granularity, check_operands, check_output, check_product
from lowering.formats import E4M3, Granularity
from lowering.hardware import Gemm, refusal, runs_kernels
from lowering.mxfp8 import gemm as mx_gemm
from lowering.mxfp8 import reference as mx
from lowering.products import Compute, Product, as_told
from lowering.rowwise import reference as rows
from lowering.trials import ALIGNMENT_BYTES, keep, layout_of

_REFERENCES: dict[Granularity, Callable[[Product], Tensor]] = {
    Granularity.TENSOR_WISE: products.of_tensors,
    Granularity.ROW_WISE: products.of_lines,
    Granularity.BLOCK_1X32: mx.multiply,
    Granularity.BLOCK_1X128: blocks.multiply,
    Granularity.BLOCK_128X128: blocks.multiply,
}


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None = None,
    *,
    granularity_a: str = "tensor_wise",
    granularity_b: str = "tensor_wise",
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """dequantized a [M, K] @ dequantized b [K, N] + bias [N], of FP8 a and b; [M, N] in `out_dtype`. Products accumulate in
    float32, the bias, of any float dtype, is added in float32, and the sum is rounded once. Granularities are members of
    `Granularity` or their values. The scales are those of a and of the copy [N, K] whose transpose b is:

        tensor_wise     scalars
        row_wise        [M, 1] and [N, 1]; either may be a scalar, which all rows share
        block_1x32      GEMM-ready E8M0 codes
        block_1x128, block_128x128    GEMM-ready, not both 128x128; each 128 of K is multiplied by its factors, then added

    Of blocks a is row-major and b column-major. `fast_accum` lets hardware accumulate in fewer bits; blocks have none.
    `implementation`, of blocks of 128: "auto" or one of `blockwise.gemm.IMPLEMENTATIONS`. "auto" is the reference on the CPU,
    on CUDA DeepGEMM, else cuBLASLt, where it has this GEMM and a trial showed that it is right, else Triton. "reference"
    emulates on any device; "mxfp8", for scales that are powers of two, multiplies as SM100 does. Raises ValueError for operands
    that do not fit and for an implementation that cannot, NotImplementedError on a GPU whose tensor cores cannot."""
    how: Any = {"granularity_a": granularity_a, "granularity_b": granularity_b, "out_dtype": out_dtype}
    product = Product(a, b, scale_inv_a, scale_inv_b, bias, **how)
    return _REFERENCES[product.granularities[0]](product)


def by_decision(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None = None,
    *,
    granularity_a: str = "tensor_wise",
    granularity_b: str = "tensor_wise",
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """`scaled_mm`, by what the device has; see NOTE [one decision]."""
    of_bias = None if bias is None else layout_of(bias)
    # fmt: off
    key = (
        a.device, a.shape, a.stride(), a.dtype, a.data_ptr() % ALIGNMENT_BYTES,
        b.shape, b.stride(), b.dtype, b.data_ptr() % ALIGNMENT_BYTES,
        scale_inv_a.shape, scale_inv_a.stride(), scale_inv_a.dtype, scale_inv_a.data_ptr() % ALIGNMENT_BYTES,
        scale_inv_b.shape, scale_inv_b.stride(), scale_inv_b.dtype, scale_inv_b.data_ptr() % ALIGNMENT_BYTES,
        of_bias, granularity_a, granularity_b, out_dtype, fast_accum, implementation,
    )
    # fmt: on
    compute = DECISIONS.get(key)  # at each call of a model: written out, because functions and loops cost microseconds
    if compute is None:
        kinds: Any = {"granularity_a": granularity_a, "granularity_b": granularity_b}
        product = Product(a, b, scale_inv_a, scale_inv_b, bias, **kinds, out_dtype=out_dtype, fast_accum=fast_accum)
        compute = decided(product, implementation)
        keep(DECISIONS, key, compute, a)
    return compute(a, b, scale_inv_a, scale_inv_b, bias)


DECISIONS: dict[Hashable, Compute] = {}


def decided(product: Product, implementation: str) -> Compute:
    """The function that computes products which differ from this one in their values alone; raises where none does."""
    check_kinds(product.granularity_a, product.granularity_b)
    kind, a, b, bias = product.granularities[0], product.a, product.b, product.bias
    has_choice = kind in blocks.GRANULARITIES
    if implementation != "auto" and not has_choice:
        raise ValueError(f"implementation is {implementation!r}; {kind.label} scales have no choice: pass 'auto'")
    if kind.block is None:
        if kind is Granularity.ROW_WISE:
            rows.check_gemm(product)
        else:
            check_operands(a, b)
            check_output(b, bias, product.out_dtype)
        if not runs_kernels(a.device):
            return as_told(_REFERENCES[kind])(product)
        from lowering import tensor_cores  # imports Triton

        return (tensor_cores.of_rows if kind is Granularity.ROW_WISE else tensor_cores.of_tensors)(product)
    check_product(a, b, bias, product.out_dtype)
    if product.fast_accum:
        raise ValueError("fast_accum is True, which scales per block do not have; pass fast_accum=False")
    (blocks if has_choice else mx).check_scales(product)
    return blocks_gemm.prepared(product, implementation) if has_choice else mx_gemm.decided(product)


def check_kinds(granularity_a: str, granularity_b: str) -> None:
    """The granularities meet in one GEMM."""
    check_granularity("granularity_a", granularity_a, Granularity)
    check_granularity("granularity_b", granularity_b, Granularity)
    # The granularities alone: of the dtypes that torch's GEMM refuses, Triton's takes E5M2 by E5M2.
    reason = refusal(Gemm(E4M3, E4M3, Granularity(granularity_a), Granularity(granularity_b)), None)
    if reason is not None:
        raise ValueError(f"{reason}; quantize one operand with 1x128 blocks, or both alike")
