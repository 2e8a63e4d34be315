"""Choices that were made without a GPU, tried on one: fast accumulation, cuBLASLt against Triton, and the tiles of casts.

A row per choice; `chosen` is what the code does today. GEMMs are those of TransformerEngine's layer (`benchmarks.gemm_layer`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks.common import SkipBenchmark, device, main
from benchmarks.correctness import FAST_ERROR, GEMM_ERROR, relative_error
from benchmarks.gemm_layer import LINEARS
from benchmarks.isolation import Bench, Row
from benchmarks.timing import Timing, columns, in_turns
from lowering.blockwise import gemm
from lowering.blockwise import reference as blockwise
from lowering.blockwise.reference import BlockwiseGemm
from lowering.formats import E4M3, E5M2, Granularity
from lowering.tensorwise import reference

ops = torch.ops.lowering
_TOKENS = 15872
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


@dataclasses.dataclass(frozen=True)
class Choice:
    """Ways to compute the same."""

    what: str
    chosen: str
    """The one that the code takes today."""
    calls: Mapping[str, Callable[[], Any]]
    check: Callable[[str, Any], bool]
    """Raises where the result of one, by its name, is not right."""
    flops: int = 0


def _timings(choice: Choice, on: torch.device, bench: Bench, extra: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Time every way that is right, and `extra` beside them."""
    right = dict(extra)
    for name, call in choice.calls.items():
        if bench(f"{choice.what}, {name}", lambda name, call: choice.check(name, call()), name, call):
            right |= {name: call}
    return in_turns(right, on, bench, lambda name: f"{choice.what}, {name}")


def _gemm_row(choice: Choice, on: torch.device, bench: Bench) -> Iterator[Row]:
    if bench.has_row(choice.what):
        return
    row: dict[str, Any] = {"what": choice.what, "chosen": choice.chosen}
    for name, timing in _timings(choice, on, bench, {}).items():
        row |= columns(name, timing) | {f"{name} TFLOP/s": choice.flops / timing.back_to_back_ms / 1e9}
    yield row


def _accumulation(name: str, m: int, n: int, k: int, on: torch.device, bench: Bench) -> Choice:
    """A per-tensor GEMM with and without fast accumulation."""
    one = torch.ones((), device=on)
    is_output = name.endswith("output")
    a = torch.randn(m, k, device=on).to(E4M3 if is_output else E5M2)
    b = torch.randn(n, k, device=on).to(E4M3).t()
    expected = a.float() @ b.float()

    def check(label: str, found: torch.Tensor) -> bool:
        error = relative_error(found, expected)
        bound = FAST_ERROR if label == "fast" else GEMM_ERROR
        return bench.require(error <= bound, f"{name}, {label}: relative error {error:.1e} <= {bound:g}")

    calls = {
        label: functools.partial(ops.scaled_mm, a, b, one, one, fast_accum=label == "fast") for label in ("fast", "accurate")
    }
    what = f"per tensor, {name} {m}x{n}x{k}"
    return Choice(what, "fast" if is_output else "accurate", calls, check, 2 * m * n * k)


def _implementation(name: str, m: int, n: int, k: int, on: torch.device, bench: Bench) -> Choice:
    """A blockwise GEMM by Triton, and by the libraries that have it."""
    one, two = Granularity.BLOCK_1X128.value, Granularity.BLOCK_128X128.value
    of_b = one if name.endswith("grad_weight") else two
    a, scale_a = ops.cast_blockwise([torch.randn(m, k, device=on, dtype=torch.bfloat16)], E4M3, granularity=one)
    b, scale_b = ops.cast_blockwise([torch.randn(n, k, device=on, dtype=torch.bfloat16)], E4M3, granularity=of_b)
    expected = blockwise.dequantize(a, scale_a, one) @ blockwise.dequantize(b, scale_b, of_b).t()
    asked = BlockwiseGemm(a, b.t(), scale_a, scale_b, granularity_a=one, granularity_b=of_b)

    def check(label: str, found: torch.Tensor) -> bool:
        error = relative_error(found, expected)
        return bench.require(error <= GEMM_ERROR, f"blockwise {name}, {label}: relative error {error:.1e} <= {GEMM_ERROR:g}")

    legal = (kind for kind, library in gemm.LIBRARIES.items() if library.refusal(asked) is None)
    kinds = ["triton", *legal] if on.type == "cuda" else ["reference"]
    scaling = {"granularity_a": one, "granularity_b": of_b}
    calls = {
        kind: functools.partial(gemm.scaled_mm_blockwise, a, b.t(), scale_a, scale_b, **scaling, implementation=kind)
        for kind in kinds
    }
    return Choice(f"blockwise, {name} {m}x{n}x{k}", gemm.chosen(asked), calls, check, 2 * m * n * k)


def _tiles(dtype: torch.dtype, rows: int, cols: int, on: torch.device, bench: Bench) -> Choice:
    """`cast_transpose` with other tiles than its own; without a GPU, the operation alone."""
    x, scale = torch.randn(rows, cols, device=on, dtype=torch.bfloat16), torch.tensor(3.0, device=on)
    expected = reference.cast([x], [scale], dtype, columnwise=True)
    what = f"cast_transpose {dtype} {rows}x{cols}"

    def check(label: str, found: Any) -> bool:
        same = all(torch.equal(f.view(torch.uint8), e.view(torch.uint8)) for f, e in zip(found, expected, strict=True))
        return bench.require(same, f"{what}, {label}: bit for bit equal to the reference")

    if on.type != "cuda":
        return Choice(what, "operation", {"operation": lambda: ops.cast([x], [scale], dtype, columnwise=True)}, check)
    from lowering.tensorwise import kernels

    def call(tile: tuple[int, int, int]) -> Any:
        with mock.patch.multiple(kernels, BLOCK_R=tile[0], BLOCK_C=tile[1], NUM_WARPS=tile[2]):
            return kernels.cast([x], [scale], dtype, columnwise=True)

    own = kernels.BLOCK_R, kernels.BLOCK_C, kernels.NUM_WARPS
    label = "{}x{}, {} warps".format
    calls = {label(*tile): functools.partial(call, tile) for tile in dict.fromkeys((own, *TILES))}
    return Choice(what, label(*own), calls, check)


def _tile_row(choice: Choice, num_bytes: int, on: torch.device, bench: Bench) -> Iterator[Row]:
    if bench.has_row(choice.what):
        return
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=on)
    times = _timings(choice, on, bench, {"copy": source.clone})
    if "copy" in times:
        shares = {f"{label} of copy": times["copy"].ms / times[label].ms for label in choice.calls if label in times}
        yield {"what": choice.what, "chosen": choice.chosen, **shares}


def run(bench: Bench) -> Iterator[Row]:
    on = device(bench.quick)
    bench.baseline = "each other"
    if on.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        raise SkipBenchmark("TF32 is on: float32 products, which GEMMs are compared with, would be less exact than they")
    tokens, shrink = (64, 64) if bench.quick else (_TOKENS, 1)
    for kind, make in (("per tensor", _accumulation), ("blockwise", _implementation)):
        for name, sizes in _shapes(tokens, shrink).items():
            choice = bench(f"{kind}, {name}", make, name, *sizes, on, bench)
            if choice is not None:
                yield from _gemm_row(choice, on, bench)
    rows, cols = (512, 512) if bench.quick else (_TOKENS, 4096)
    for dtype in (E4M3, E5M2):
        choice = bench(f"cast_transpose {dtype}", _tiles, dtype, rows, cols, on, bench)
        if choice is not None:
            yield from _tile_row(choice, rows * cols * 4, on, bench)


if __name__ == "__main__":
    main("tune", run)
