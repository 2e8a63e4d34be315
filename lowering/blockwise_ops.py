"""The blockwise operations as registered: schema, shape function and dispatch of each.

An operation's name means its mathematics (`blockwise_reference.py`, which also describes the layouts of scales). Triton
kernels quantize on devices with FP8 instructions, the eager reference elsewhere; who computes a GEMM is decided in one
place, `_gemm_implementation`. All are registered under `torch.ops.lowering`; none has an autograd formula.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from lowering import blockwise_checks as checks
from lowering import blockwise_cublaslt
from lowering import blockwise_reference as reference
from lowering.formats import pad_to_alignment
from lowering.hardware import FP8_CAPABILITY, cuda_capability, runs_kernels

GEMM_IMPLEMENTATIONS = ("auto", "triton", "cublaslt", "reference")

Pair = tuple[torch.Tensor, torch.Tensor]
Quadruple = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_LIBRARY = torch.library.Library("lowering", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_SCALING = "bool power_of_2=True, float epsilon=0.0"
_SCHEMAS = {
    "quantize_blockwise": f"(Tensor x, ScalarType dtype, int[] block, *, {_SCALING}) -> (Tensor, Tensor)",
    "cast_blockwise": (
        "(Tensor x, ScalarType dtype, *, int block_dims, bool columnwise=False, bool pad_outer=False,"
        f" {_SCALING}) -> (Tensor, Tensor)"
    ),
    "cast_transpose_blockwise": (
        "(Tensor x, ScalarType dtype, *, int block_dims, bool pad_rows=False, bool pad_cols=False,"
        f" {_SCALING}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "compact_blockwise": (f"(Tensor x, ScalarType dtype, *, int block_dims, {_SCALING}) -> (Tensor, Tensor, Tensor, Tensor)"),
    "gemm_ready_blockwise": (
        "(Tensor q, Tensor scale_inv, *, int block_dims, bool columnwise=False, bool pad_outer=False) -> (Tensor, Tensor)"
    ),
    "scaled_mm_blockwise": (
        "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias=None, *, int block_dims_a,"
        ' int block_dims_b, ScalarType out_dtype=bfloat16, str implementation="auto") -> Tensor'
    ),
}


def _cast_implementation(x: torch.Tensor) -> ModuleType:
    """The module whose functions quantize on the device of `x`; both give the same bits."""
    if runs_kernels(x.device):
        from lowering.kernels import blockwise_cast  # imports Triton

        return blockwise_cast
    return reference


def _quantize_blockwise(
    x: torch.Tensor, dtype: torch.dtype, block: list[int], *, power_of_2: bool = True, epsilon: float = 0.0
) -> Pair:
    checks.check_quantize(x, dtype)
    checks.check_block(block)
    return _cast_implementation(x).quantize_blockwise(x, dtype, tuple(block), power_of_2, epsilon)


def _cast_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block_dims: int,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Pair:
    checks.check_matrix(x, dtype, block_dims)
    cast = _cast_implementation(x).cast_blockwise
    return cast(x, dtype, block_dims, columnwise, pad_outer, power_of_2, epsilon)


def _cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block_dims: int,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Quadruple:
    checks.check_matrix(x, dtype, block_dims)
    cast = _cast_implementation(x).cast_transpose_blockwise
    return cast(x, dtype, block_dims, pad_rows, pad_cols, power_of_2, epsilon)


def _compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, block_dims: int, power_of_2: bool = True, epsilon: float = 0.0
) -> Quadruple:
    checks.check_matrix(x, dtype, block_dims)
    return _cast_implementation(x).compact_blockwise(x, dtype, block_dims, power_of_2, epsilon)


def _gemm_ready_blockwise(
    q: torch.Tensor, scale_inv: torch.Tensor, *, block_dims: int, columnwise: bool = False, pad_outer: bool = False
) -> Pair:
    checks.check_compact(q, scale_inv, block_dims, columnwise)
    return reference.gemm_ready_blockwise(q, scale_inv, columnwise, block_dims, pad_outer)


def _scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> torch.Tensor:
    checks.check_gemm(a, b, bias, block_dims_a, block_dims_b, out_dtype)
    checks.check_gemm_scales("a", scale_inv_a, a.shape[0], a.shape[1], block_dims_a)
    checks.check_gemm_scales("b", scale_inv_b, b.shape[1], b.shape[0], block_dims_b)
    gemm = _gemm_implementation(a, b, bias, (block_dims_a, block_dims_b), out_dtype, implementation)
    return gemm(a, b, scale_inv_a, scale_inv_b, bias, block_dims_a, block_dims_b, out_dtype)


def _auto(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, block_dims: tuple[int, int], out_dtype: torch.dtype
) -> str:
    """The implementation that "auto" stands for."""
    if not a.is_cuda:
        return "reference"
    is_supported = blockwise_cublaslt.refusal(a, b, bias, out_dtype) is None
    return "cublaslt" if is_supported and blockwise_cublaslt.is_right(a, b, bias, block_dims, out_dtype) else "triton"


def _gemm_implementation(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    block_dims: tuple[int, int],
    out_dtype: torch.dtype,
    implementation: str,
) -> Callable[..., torch.Tensor]:
    """The function that computes a blockwise GEMM; raises where the requested one cannot, and never replaces it."""
    if implementation not in GEMM_IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; use one of {', '.join(GEMM_IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = _auto(a, b, bias, block_dims, out_dtype)
    if implementation == "reference":
        return reference.scaled_mm_blockwise
    if implementation == "cublaslt":
        reason = blockwise_cublaslt.refusal(a, b, bias, out_dtype)
        if reason is not None:
            raise ValueError(f"cuBLASLt cannot compute this blockwise GEMM: {reason}; use implementation='triton'")
        return blockwise_cublaslt.scaled_mm_blockwise
    if not a.is_cuda:
        raise ValueError(f"implementation='triton' needs CUDA tensors, a is on {a.device}; use 'reference' there")
    if not runs_kernels(a.device):
        raise NotImplementedError(
            f"{torch.cuda.get_device_name(a.device)} has no FP8 tensor cores (compute capability"
            f" {cuda_capability(a.device)}, needed is {FP8_CAPABILITY}), or Triton is not installed;"
            " implementation='reference' emulates the GEMM in float32"
        )
    from lowering.kernels import blockwise_gemm  # imports Triton

    return blockwise_gemm.scaled_mm_blockwise


# Shape functions: metadata only, no data read.


def _fake_quantize_blockwise(
    x: torch.Tensor, dtype: torch.dtype, block: list[int], *, power_of_2: bool = True, epsilon: float = 0.0
) -> Pair:
    checks.check_quantize(x, dtype)
    checks.check_block(block)
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    shape = reference.compact_scale_shape(rows, x.shape[-1], reference.block_dims_of(block))
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


def _fake_cast_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block_dims: int,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Pair:
    checks.check_matrix(x, dtype, block_dims)
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else x.shape
    return _fake_copy(x, dtype, outer, inner, block_dims, pad_outer)


def _fake_copy(x: torch.Tensor, dtype: torch.dtype, outer: int, inner: int, block_dims: int, pad_outer: bool) -> Pair:
    outer = pad_to_alignment(outer) if pad_outer else outer
    scale_shape = reference.gemm_ready_scale_shape(outer, inner, block_dims)
    return (
        x.new_empty((outer, pad_to_alignment(inner)), dtype=dtype),
        x.new_empty(scale_shape, dtype=torch.float32),
    )


def _fake_cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block_dims: int,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Quadruple:
    return (
        *_fake_cast_blockwise(x, dtype, block_dims=block_dims, pad_outer=pad_rows),
        *_fake_cast_blockwise(x, dtype, block_dims=block_dims, columnwise=True, pad_outer=pad_cols),
    )


def _fake_compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, block_dims: int, power_of_2: bool = True, epsilon: float = 0.0
) -> Quadruple:
    checks.check_matrix(x, dtype, block_dims)
    a, b = x.shape
    shapes = (
        reference.compact_scale_shape(a, b, block_dims),
        reference.compact_scale_shape(b, a, block_dims)[::-1],
    )
    copies = [(x.new_empty((a, b), dtype=dtype), x.new_empty(s, dtype=torch.float32)) for s in shapes]
    return *copies[0], *copies[1]


def _fake_gemm_ready_blockwise(
    q: torch.Tensor, scale_inv: torch.Tensor, *, block_dims: int, columnwise: bool = False, pad_outer: bool = False
) -> Pair:
    checks.check_block_dims("block_dims", block_dims)
    outer, inner = (q.shape[1], q.shape[0]) if columnwise else q.shape
    return _fake_copy(q, q.dtype, outer, inner, block_dims, pad_outer)


def _fake_scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> torch.Tensor:
    checks.check_gemm(a, b, bias, block_dims_a, block_dims_b, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=_TAGS)
    _LIBRARY.impl(_name, globals()[f"_{_name}"], "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowering::{_name}", globals()[f"_fake_{_name}"], lib=_LIBRARY)
