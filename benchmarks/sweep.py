"""What was chosen without a GPU, tried on one: fast accumulation, cuBLASLt against Triton, and the tiles of casts.

A row per choice; `chosen` is what the code does today. GEMMs are those of TransformerEngine's layer (`benchmarks.gemm_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.common import Result, SkipBenchmark, device, main, require
from benchmarks.gemm_layer import LINEARS
from benchmarks.timing import in_turns
from lowering.blockwise import cublaslt, gemm
from lowering.blockwise import reference as blockwise
from lowering.blockwise.arguments import BlockwiseGemm
from lowering.formats import E4M3, E5M2, Granularity
from lowering.tensorwise import reference

ops = torch.ops.lowering
_TOKENS = 15872
#: Largest relative error, in the Frobenius norm, of a GEMM with a bfloat16 result (tests/tolerances.py).
_ERROR, _FAST_ERROR = 1e-2, 2e-2
#: Rows, columns and warps of a tile of `cast_transpose`.
TILES = ((128, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (256, 64, 8), (128, 32, 4))


def _shapes(tokens: int, shrink: int) -> dict[str, tuple[int, int, int]]:
    """Name -> M, N, K of every GEMM of the layer."""
    found = {}
    for name, (inputs, outputs) in LINEARS.items():
        inputs, outputs = inputs // shrink, outputs // shrink
        found[f"{name} output"] = tokens, outputs, inputs
        found[f"{name} grad_input"] = tokens, inputs, outputs
        found[f"{name} grad_weight"] = outputs, inputs, tokens
    return found


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def _gemm_row(what: str, chosen: str, calls: dict[str, Callable[[], Any]], flops: int, on: torch.device) -> dict[str, Any]:
    times = in_turns(calls, on)
    row: dict[str, Any] = {"what": what, "chosen": chosen}
    row |= {f"{label} ms": timing.ms for label, timing in times.items()}
    row |= {f"{label} back-to-back ms": timing.back_to_back_ms for label, timing in times.items()}
    return row | {f"{label} TFLOP/s": flops / timing.ms / 1e9 for label, timing in times.items()}


def _accumulation(tokens: int, shrink: int, on: torch.device, checks: list[str]) -> Iterator[dict[str, Any]]:
    """Per-tensor GEMMs with and without fast accumulation."""
    one = torch.ones((), device=on)
    for name, (m, n, k) in _shapes(tokens, shrink).items():
        is_output = name.endswith("output")
        a = torch.randn(m, k, device=on).to(E4M3 if is_output else E5M2)
        b = torch.randn(n, k, device=on).to(E4M3).t()
        expected = a.float() @ b.float()
        calls: dict[str, Callable[[], Any]] = {}
        for label, fast in (("fast", True), ("accurate", False)):

            def call(fast: bool = fast, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
                return ops.scaled_mm(a, b, one, one, fast_accum=fast)

            error = _relative_error(call(), expected)
            bound = _FAST_ERROR if fast else _ERROR
            require(error <= bound, f"{name}, {label}: relative error {error:.1e} <= {bound:g}", checks)
            calls[label] = call
        yield _gemm_row(f"per tensor, {name} {m}x{n}x{k}", "fast" if is_output else "accurate", calls, 2 * m * n * k, on)


def _implementations(tokens: int, shrink: int, on: torch.device, checks: list[str]) -> Iterator[dict[str, Any]]:
    """Blockwise GEMMs by cuBLASLt and by Triton."""
    one, two = Granularity.BLOCK_1X128.value, Granularity.BLOCK_128X128.value
    for name, (m, n, k) in _shapes(tokens, shrink).items():
        of_b = one if name.endswith("grad_weight") else two
        a, scale_a = ops.cast_blockwise([torch.randn(m, k, device=on, dtype=torch.bfloat16)], E4M3, granularity=one)
        b, scale_b = ops.cast_blockwise([torch.randn(n, k, device=on, dtype=torch.bfloat16)], E4M3, granularity=of_b)
        expected = blockwise.dequantize(a, scale_a, one) @ blockwise.dequantize(b, scale_b, of_b).t()
        kinds = ["triton", "cublaslt"] if on.type == "cuda" else ["reference"]
        asked = BlockwiseGemm(a, b.t(), scale_a, scale_b, granularity_a=one, granularity_b=of_b)
        if cublaslt.refusal(asked) is not None and on.type == "cuda":
            kinds.remove("cublaslt")
        calls: dict[str, Callable[[], Any]] = {}
        for kind in kinds:

            def call(kind: str = kind, a: Any = a, b: Any = b, sa: Any = scale_a, sb: Any = scale_b, gb: str = of_b) -> Any:
                return gemm.scaled_mm_blockwise(a, b.t(), sa, sb, granularity_a=one, granularity_b=gb, implementation=kind)

            error = _relative_error(call(), expected)
            require(error <= _ERROR, f"blockwise {name}, {kind}: relative error {error:.1e} <= {_ERROR:g}", checks)
            calls[kind] = call
        yield _gemm_row(f"blockwise, {name} {m}x{n}x{k}", gemm.chosen(asked), calls, 2 * m * n * k, on)


def _tiles(rows: int, cols: int, on: torch.device, checks: list[str]) -> Iterator[dict[str, Any]]:
    """cast_transpose with other tiles than its own."""
    if on.type != "cuda":
        return
    from lowering.tensorwise.kernels import cast_transpose as kernel
    from lowering.tensorwise.kernels.casts import cast

    x, scale = torch.randn(rows, cols, device=on, dtype=torch.bfloat16), torch.tensor(3.0, device=on)
    own = kernel.BLOCK_R, kernel.BLOCK_C, kernel.NUM_WARPS
    for dtype in (E4M3, E5M2):
        expected = reference.cast([x], [scale], dtype, columnwise=True)
        calls: dict[str, Callable[[], Any]] = {}
        for tile in dict.fromkeys((own, *TILES)):

            def call(tile: tuple[int, int, int] = tile, dtype: torch.dtype = dtype) -> Any:
                with mock.patch.multiple(kernel, BLOCK_R=tile[0], BLOCK_C=tile[1], NUM_WARPS=tile[2]):
                    return cast([x], [scale], dtype, columnwise=True)

            label = "{}x{}, {} warps".format(*tile)
            pairs = zip(call(), expected, strict=True)
            same = all(torch.equal(f.view(torch.uint8), e.view(torch.uint8)) for f, e in pairs)
            require(same, f"cast_transpose {dtype}, tile {label}: bit for bit equal to the reference", checks)
            calls[label] = call
        moved = x.numel() * (x.element_size() + 2)
        source = torch.empty(moved // 2, dtype=torch.uint8, device=on)
        times = in_turns({"copy": lambda s=source: s.clone(), **calls}, on)
        row: dict[str, Any] = {"what": f"cast_transpose {dtype} {rows}x{cols}", "chosen": "{}x{}, {} warps".format(*own)}
        yield row | {f"{label} of copy": times["copy"].ms / times[label].ms for label in calls}


def _rows(quick: bool, on: torch.device, checks: list[str]) -> Iterator[dict[str, Any]]:
    tokens, shrink = (64, 64) if quick else (_TOKENS, 1)
    yield from _accumulation(tokens, shrink, on, checks)
    yield from _implementations(tokens, shrink, on, checks)
    yield from _tiles(*((512, 512) if quick else (_TOKENS, 4096)), on, checks)


def run(quick: bool) -> Result:
    on = device(quick)
    if on.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        raise SkipBenchmark("TF32 is on: float32 products, which GEMMs are compared with, would be less exact than they")
    checks: list[str] = []
    return Result(_rows(quick, on, checks), "each other", checks)


if __name__ == "__main__":
    main("sweep", run)
